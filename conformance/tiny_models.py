"""Models of mlx-lm on disk: a layer or two of random weights, and a tokenizer of a few words."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

WORDS = 96
WINDOW = 16
SEED = 20261
EOS_TOKEN = 0

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": WORDS,
    "rms_norm_eps": 1e-5,
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 512, "tie_word_embeddings": False},
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 3},
}


def save_model(name: str, directory: Path, moved: float = 0.0, **sizes: Any) -> Path:
    """A model that mlx-lm loads, with weights large enough that every key counts in the answer.

    The weights are the same ones each time, but for noise of the size `moved`: a draft model agrees by and large.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    config = {"model_type": name, **SIZES, **MORE[name], **sizes}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.random.seed(SEED)
    for size in (0.3, moved):
        model.update(tree_map(lambda w, size=size: w + size * mx.random.normal(w.shape), model.parameters()))
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Words t0, t1, ... with spaces between them; a chat is its contents, one after the other."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token=f"t{EOS_TOKEN}"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="t0", unk_token="t0")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(directory)


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)
