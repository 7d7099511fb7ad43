"""Runs serving sessions on mlx-lm's own `BatchGenerator` and model code, and records every call on the caches.

Nothing here calls a cache: the model code and the generator do. A golden holds the caches of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.goldens import Golden
from conformance.operations import Operation
from conformance.payload import Config
from conformance.record import record_steps
from conformance.recorded import RecordedPayload
from conformance.sessions import Action, Finish, Insert, Next, PutBack, Remove, Session
from conformance.situations.build import Deviation, Situation

SEED = 20260
WINDOWS = {"gemma3_text": 5, "gpt_oss": 4}


def make_model(name: str, dtype: str) -> Any:
    """mlx-lm's own model code with two layers, heads of 8 and random weights; the same ones each time."""
    import importlib

    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{name}")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 64,
        "rms_norm_eps": 1e-5,
    }
    more: dict[str, dict[str, Any]] = {
        "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
        "qwen3": {"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True},
        "gemma3_text": {"sliding_window": WINDOWS["gemma3_text"], "sliding_window_pattern": 2},
        "gpt_oss": {"sliding_window": WINDOWS["gpt_oss"], "num_local_experts": 2, "num_experts_per_tok": 1},
    }
    mx.random.seed(SEED)
    model = module.Model(module.ModelArgs(model_type=name, **{**sizes, **more[name]}))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


class Serving:
    """A generator, the sequences that were given to it, and what it gave back."""

    def __init__(self, session: Session, capture: Any) -> None:
        from mlx_lm.generate import BatchGenerator

        self.model = make_model(session.model, session.dtype)
        self.capture = capture
        self.uids: list[int] = []
        self.finished: dict[int, list[Any]] = {}
        self.generator = BatchGenerator(
            self.model,
            prefill_step_size=session.prefill_step_size,
            prefill_batch_size=session.prefill_batch_size,
            completion_batch_size=session.completion_batch_size,
        )

    def act(self, action: Action) -> None:
        """Do one thing that a server does."""
        match action:
            case Insert():
                caches = [self._new_caches(len(self.uids) + i) for i in range(len(action.segments))]
                of = [[list(segment) for segment in sequence] for sequence in action.segments]
                self.uids += self.generator.insert_segments(of, list(action.max_tokens), caches)
            case PutBack():
                caches = [self.finished[self.uids[action.sequence]]]
                self.uids += self.generator.insert([list(action.prompt)], [action.max_tokens], caches)
            case Remove():
                self.generator.remove([self.uids[i] for i in action.sequences])
            case Next():
                for _ in range(action.times):
                    self._next()
            case Finish():
                while self._next():
                    pass

    def _new_caches(self, number: int) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model)
        self.capture.follow_new(caches, chr(ord("a") + number))
        return caches

    def _next(self) -> bool:
        fed, generated = self.generator.next()
        for response in generated:
            if response.finish_reason is not None:
                self.finished[response.uid] = response.prompt_cache
        return bool(fed or generated)


def record_session(session: Session, path: Path, source: dict[str, str]) -> Iterator[Golden]:
    """A golden for each layer. Raises RecordError when mlx-lm breaks a law that the session does not name."""
    from conformance.capture import Capture, Playback, head_shapes, wrapped

    capture = Capture(session.layers)
    with wrapped(capture):
        serving = Serving(session, capture)
        for action in session.actions:
            serving.act(action)
        serving.generator.close()
    for layer in session.layers:
        events = capture.events[layer]
        inputs = {str(number): event.inputs for number, event in enumerate(events, 1) if event.inputs is not None}
        playback = Playback(events, source["name"], source["version"])
        situation = _situation(session, head_shapes(events), tuple(event.operation for event in events))
        about = {"model": f"{session.model}, random weights of seed {SEED}", "layer": str(layer)}
        name = path.name if session.filed_as else f"{path.name}_layer{layer}"
        golden_path = path.with_name(f"{name}.json")
        cut = bool(session.about)
        yield record_steps(situation, golden_path, playback, RecordedPayload(inputs), {**source, **about}, cut)


def _situation(session: Session, config: Config, operations: tuple[Operation, ...]) -> Situation:
    if not session.about:
        return Situation(session.path, session.description, session.flags, operations, config)
    return Deviation(
        session.path,
        session.description,
        session.flags,
        operations,
        config,
        session.does,
        session.right,
        session.about,
    )
