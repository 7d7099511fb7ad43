"""Runs serving sessions on mlx-lm's own generators and model code, and records every call on the caches.

Nothing here calls a cache: the model code and the generator do. A golden holds the caches of one layer. The models are
the zoo's, but for the first four, whose recordings have sizes and weights of their own. They run on the CPU wherever
this is: mlx-lm's kernel for the states of mamba wants 32 features on Metal, for which a golden has no room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conformance.goldens import Golden
from conformance.operations import Operation
from conformance.payload import Config
from conformance.record import record_steps
from conformance.recorded import RecordedPayload
from conformance.sessions import Action, Finish, Insert, Next, PutBack, Remove, Session
from conformance.situations.build import Deviation, Situation
from conformance.zoo import families, models

SEED = 20260
FIRST: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 5, "sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
}
"""The first models, by what they have beside the sizes of all four."""


def make_model(session: Session) -> tuple[Any, int]:
    """mlx-lm's own model code with random weights, the same ones each time, and the seed that they come from."""
    if session.model in FIRST:
        return _first_model(session.model, session.dtype), SEED
    return models.make_model(session.model, session.dtype, **session.sizes), models.SEED


def _first_model(name: str, dtype: str) -> Any:
    """A model with two layers and heads of 8."""
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
    mx.random.seed(SEED)
    model = module.Model(module.ModelArgs(model_type=name, **{**sizes, **FIRST[name]}))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


@contextmanager
def _on_cpu() -> Iterator[None]:
    import mlx.core as mx

    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


class Serving:
    """A generator, the sequences that were given to it, and what it gave back."""

    def __init__(self, session: Session, capture: Any) -> None:
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator

        self.session = session
        self.model, self.seed = make_model(session)
        self.capture = capture
        self.sequences = 0
        self.uids: list[int] = []
        self.finished: dict[int, list[Any]] = {}
        # mlx-lm's own stream is on the device that was the default when it was imported.
        self.stream = mx.default_stream(mx.cpu)
        self.generator = BatchGenerator(
            self.model,
            prefill_step_size=session.prefill_step_size,
            prefill_batch_size=session.prefill_batch_size,
            completion_batch_size=session.completion_batch_size,
            stream=self.stream,
        )

    def act(self, action: Action) -> None:
        """Do one thing that a server does."""
        match action:
            case Insert():
                caches = [self._new_caches() for _ in action.segments]
                of = [[list(segment) for segment in sequence] for sequence in action.segments]
                if families.BY_NAME[self.session.model].alone:
                    self._generate(of, action.max_tokens, caches)
                else:
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

    def _new_caches(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model, self.session.max_kv_size)
        self.capture.follow_new(caches, chr(ord("a") + self.sequences))
        self.sequences += 1
        return caches

    def _generate(self, of: list[list[list[int]]], max_tokens: tuple[int, ...], caches: list[list[Any]]) -> None:
        """Sequences of a model that mlx-lm does not batch, one after the other."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        for segments, wanted, cache in zip(of, max_tokens, caches, strict=True):
            prompt = mx.array([token for segment in segments for token in segment])
            size = self.session.prefill_step_size
            step = generate_step(
                prompt, self.model, max_tokens=wanted, prompt_cache=cache, prefill_step_size=size, stream=self.stream
            )
            for _ in step:
                pass

    def _next(self) -> bool:
        fed, generated = self.generator.next()
        for response in generated:
            if response.finish_reason is not None:
                self.finished[response.uid] = response.prompt_cache
        return bool(fed or generated)


def record_session(session: Session, path: Path, source: dict[str, str]) -> Iterator[Golden]:
    """A golden for each layer. Raises RecordError when mlx-lm breaks a law that the session does not name."""
    from conformance.capture import Capture, Playback, head_shapes
    from conformance.wrapping import wrapped

    capture = Capture(session.layers)
    with _on_cpu(), wrapped(capture):
        serving = Serving(session, capture)
        for action in session.actions:
            serving.act(action)
        serving.generator.close()
    for layer in session.layers:
        events = capture.events[layer]
        inputs = {f"{n}.{name}": x for n, event in enumerate(events, 1) for name, x in event.inputs.items()}
        playback = Playback(events, source["name"], source["version"])
        situation = _situation(session, head_shapes(events), tuple(event.operation for event in events))
        model = f"{session.model}, random weights of seed {serving.seed}"
        about = {"model": model, "layer": str(layer), "device": "cpu"}
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
