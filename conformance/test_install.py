"""`mlximpl.install()`: what mlx-lm makes is mlximpl's, and afterwards everything is what it was."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

import mlximpl
from conformance.tiny_models import save_model
from conformance.zoo import models as zoo
from mlximpl.kinds import KINDS

theirs = pytest.importorskip("mlx_lm.models.cache")
# Functions of mlx_lm hide some of its modules.
cache_prompt, chat, gemma3_text, generate, mamba, server = (
    importlib.import_module(f"mlx_lm.{name}")
    for name in ("cache_prompt", "chat", "models.gemma3_text", "generate", "models.mamba", "server")
)
OWN = dict(vars(theirs))
FUNCTIONS = ["make_prompt_cache", "save_prompt_cache", "load_prompt_cache", "trim_prompt_cache", "LRUPromptCache"]
PROMPT = [5, 9, 1, 7, 7, 3, 2, 8, 30, 4, 6, 1, 9, 22, 3, 17, 25, 12, 40, 2]


def make_model(name: str) -> Any:
    """A tiny model; of the zoo, but for mamba."""
    if name != "mamba":
        return zoo.make_model(name)
    module = mamba
    sizes = {"hidden_size": 16, "intermediate_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4}
    mx.random.seed(5)
    more = {"use_bias": True, "use_conv_bias": True, "time_step_rank": 2, "vocab_size": 64}
    model = module.Model(module.ModelArgs(model_type=name, **sizes, **more))
    model.update(tree_map(lambda w: w + 0.3 * mx.random.normal(w.shape), model.parameters()))
    return model


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


def names() -> dict[tuple[str, str], Any]:
    """Every name of every module of mlx-lm, and what is seen under it."""
    modules = {name: m for name, m in sys.modules.items() if name.partition(".")[0] == "mlx_lm"}
    return {(name, key): getattr(m, key) for name, m in modules.items() if m is not None for key in vars(m)}


def changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    assert before.keys() <= after.keys()
    return {key for key, value in before.items() if after[key] is not value}


# --- the switch ----------------------------------------------------------------------------------


def test_every_name_of_a_cache_is_ours_and_nothing_else_changes() -> None:
    before = names()
    wanted = [OWN[name] for name in [*KINDS, *FUNCTIONS]]
    with mlximpl.install():
        assert changed(before, names()) == {
            key for key, value in before.items() if any(value is each for each in wanted)
        }
        for name, ours in KINDS.items():
            assert getattr(theirs, name) is ours
        assert theirs.make_prompt_cache is chat.make_prompt_cache is mlximpl.make_prompt_cache
        assert gemma3_text.RotatingKVCache is mlximpl.RotatingKVCache
        assert generate.load_prompt_cache is mlximpl.load_prompt_cache
        assert cache_prompt.save_prompt_cache is theirs.save_prompt_cache
        assert server.LRUPromptCache is theirs.LRUPromptCache
        assert generate.trim_prompt_cache is theirs.trim_prompt_cache
        assert generate.can_trim_prompt_cache is OWN["can_trim_prompt_cache"]
    assert changed(before, names()) == set()
    assert type(theirs) is ModuleType


def test_a_module_imported_meanwhile_has_ours_and_then_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlx_lm.models.falcon_h1", raising=False)
    monkeypatch.delattr("mlx_lm.models.falcon_h1", raising=False)
    with mlximpl.install():
        module = importlib.import_module("mlx_lm.models.falcon_h1")
        assert module.CacheList is mlximpl.CacheList
        assert module.ArraysCache is mlximpl.ArraysCache
    for name in ("ArraysCache", "CacheList", "KVCache"):
        assert getattr(module, name) is OWN[name]


def test_a_name_that_held_ours_before_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "make_prompt_cache", mlximpl.make_prompt_cache)
    monkeypatch.setattr(chat, "a_cache", OWN["KVCache"], raising=False)
    with mlximpl.install():
        assert chat.a_cache is mlximpl.KVCache
    assert chat.make_prompt_cache is mlximpl.make_prompt_cache
    assert chat.a_cache is OWN["KVCache"]


def test_twice_is_once() -> None:
    before = names()
    with mlximpl.install():
        inside = names()
        with mlximpl.install():
            assert changed(inside, names()) == set()
        assert changed(inside, names()) == set()
    assert changed(before, names()) == set()
    mlximpl.install()
    mlximpl.install()
    assert changed(inside, names()) != set()  # another subclass of the store
    mlximpl.uninstall()
    assert changed(before, names()) == set()
    mlximpl.uninstall()
    assert changed(before, names()) == set()


def test_an_error_within_undoes_it_too() -> None:
    with pytest.raises(KeyError), mlximpl.install():
        raise KeyError
    assert theirs.KVCache is OWN["KVCache"]


def test_it_holds_for_every_thread() -> None:
    found: list[Any] = []
    with mlximpl.install():
        thread = Thread(target=lambda: found.append(theirs.KVCache()))
        thread.start()
        thread.join()
    assert type(found[0]) is mlximpl.KVCache


@pytest.mark.parametrize("version", ["0.31.3", "0.33.0"])
def test_another_version_is_refused_before_anything_is_changed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_lm._version.__version__", version)
    before = names()
    for call in (mlximpl.install, lambda: mlximpl.to_mlx_lm(mlximpl.KVCache())):
        with pytest.raises(
            mlximpl.MlxLmVersionError, match=rf"mlx-lm {version} is installed, but .* 0\.32\.2"
        ) as error:
            call()
        assert error.value.version == version
    assert changed(before, names()) == set()
    assert type(theirs) is ModuleType


def test_without_mlx_lm_it_says_so() -> None:
    probe = (
        "import sys, mlximpl\n"
        "sys.modules['mlx_lm'] = None\n"
        "try: mlximpl.install()\n"
        "except ImportError as error: assert 'needs mlx-lm' in str(error), error\n"
        "else: raise AssertionError\n"
        "mlximpl.uninstall()\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


# --- what mlx-lm makes then ----------------------------------------------------------------------


def greedy(model: Any, prompt: list[int] = PROMPT, count: int = 12, **more: Any) -> list[int]:
    return [int(token) for token, _ in generate.generate_step(mx.array(prompt), model, max_tokens=count, **more)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba", "falcon_h1", "qwen3_next"])
def test_models_make_ours_and_answer_the_same(name: str) -> None:
    model = make_model(name)
    expected = greedy(model)
    assert expected != greedy(model, PROMPT[-1:])
    with mlximpl.install():
        caches = generate.make_prompt_cache(model)
        assert all(type(cache).__module__.startswith("mlximpl") for cache in caches)
        if hasattr(model, "make_cache"):
            assert all(type(cache).__module__.startswith("mlximpl") for cache in model.make_cache())
        assert greedy(model) == greedy(model, prompt_cache=caches) == expected


def test_a_generator_of_batches_makes_ours() -> None:
    model = make_model("gemma3_text")
    prompts = [PROMPT, PROMPT[:3], PROMPT[4:15]]
    expected = [greedy(model, prompt) for prompt in prompts]
    with mlximpl.install():
        generator = generate.BatchGenerator(model, stop_tokens=[])
        uids = generator.insert(prompts, max_tokens=[12] * 3)
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        caches = {}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid].append(response.token)
                if response.finish_reason is not None:
                    caches[response.uid] = response.prompt_cache, response.all_tokens
        generator.close()
    assert list(tokens.values()) == expected
    for cache, fed in caches.values():
        assert all(type(layer).__module__.startswith("mlximpl") for layer in cache)
        assert [layer.offset for layer in cache] == [len(fed)] * len(cache)


def test_max_kv_size_is_honoured_or_refused() -> None:
    llama, gemma = make_model("llama"), make_model("gemma3_text")
    with mlximpl.install():
        assert {cache.max_size for cache in theirs.make_prompt_cache(llama, 8)} == {8}
        with pytest.raises(ValueError, match="above max_kv_size 5"):
            greedy(gemma, max_kv_size=5)


# --- caches that were made before ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba", "falcon_h1"])
def test_caches_made_before_go_on(name: str) -> None:
    model = make_model(name)
    expected = greedy(model)
    before = theirs.make_prompt_cache(model)
    model(mx.array([PROMPT[:7]]), cache=before)
    with mlximpl.install():
        assert greedy(model, PROMPT[7:], prompt_cache=before) == expected
    if name != "mamba":
        after = mlximpl.make_prompt_cache(model)
        model(mx.array([PROMPT[:7]]), cache=after)
        assert greedy(model, PROMPT[7:], prompt_cache=after) == expected


def test_whoever_ends_last_undoes_it() -> None:
    before = names()
    first, second = mlximpl.install(), mlximpl.install()
    first.__exit__(None, None, None)
    assert theirs.KVCache is mlximpl.KVCache
    second.__exit__(None, None, None)
    assert changed(before, names()) == set()
    old = mlximpl.install()
    mlximpl.uninstall()
    mlximpl.install()
    old.__exit__(None, None, None)
    assert theirs.KVCache is mlximpl.KVCache
    mlximpl.uninstall()
    assert changed(before, names()) == set()


def test_layers_are_trimmed_all_or_none() -> None:
    layers: list[Any] = [mlximpl.KVCache(), mlximpl.RotatingKVCache(4)]
    for n in (1, 1, 1, 1, 1, 3):
        for layer in layers:
            layer.update_and_fetch(mx.zeros((1, 1, n, 4)), mx.zeros((1, 1, n, 4)))
    with mlximpl.install():
        assert theirs.trim_prompt_cache(layers, 5) == 0
        assert [layer.offset for layer in layers] == [8, 8]
        with pytest.raises(ValueError, match="-1"):
            theirs.trim_prompt_cache(layers, -1)
        assert theirs.trim_prompt_cache(layers, 3) == 3
        assert [layer.offset for layer in layers] == [5, 5]


def test_a_kind_of_the_models_own_stays() -> None:
    own = type("LayerCache", (), {"__module__": "mlx_lm.models.some_model"})()
    model = type("Model", (), {"make_cache": lambda self: [own, OWN["KVCache"]()]})()
    made = mlximpl.make_prompt_cache(model)
    assert made[0] is own and type(made[1]) is mlximpl.KVCache
    with pytest.raises(ValueError, match="cache 0 of the model is a LayerCache, which is not available here"):
        mlximpl.make_prompt_cache(model, 8)


def test_mamba_is_refused_where_it_would_leave_its_state_unwritten() -> None:
    model = make_model("mamba")
    with pytest.raises(ValueError, match=r"mamba keeps its state in mlx-lm's own ArraysCache alone: call mlximpl"):
        mlximpl.make_prompt_cache(model)
    with mlximpl.install():
        assert [type(cache) for cache in mlximpl.make_prompt_cache(model)] == [mlximpl.ArraysCache] * 2


def test_mlx_lms_caches_still_make_mlx_lms() -> None:
    keys = mx.ones((1, 2, 3, 32))

    def fed(kind: str, *arguments: Any) -> Any:
        cache = OWN[kind](*arguments)
        cache.update_and_fetch(keys, keys)
        return cache

    with mlximpl.install():
        batch = fed("KVCache").merge([fed("KVCache"), fed("KVCache")])
        ring = fed("RotatingKVCache", 4).merge([fed("RotatingKVCache", 4)] * 2)
        pairs = [OWN["CacheList"](fed("KVCache"), OWN["ArraysCache"](1)) for _ in range(2)]
        lists = pairs[0].merge(pairs)
        made = [batch, batch.extract(0), ring, ring.extract(1), lists, lists[0], fed("KVCache").to_quantized(32)]
    solos, batches = ["KVCache", "RotatingKVCache"], ["BatchKVCache", "BatchRotatingKVCache"]
    expected = [batches[0], solos[0], batches[1], solos[1], "CacheList", "BatchKVCache", "QuantizedKVCache"]
    assert [type(each) for each in made] == [OWN[name] for name in expected]


def test_the_class_that_mamba_asks_for() -> None:
    with mlximpl.install():
        kind = mamba.ArraysCache
        for cache in (kind(2), OWN["ArraysCache"](2), mlximpl.ArraysCache(2)):
            assert isinstance(cache, kind)
        assert not isinstance(mlximpl.KVCache(), kind)
        assert type(kind.merge([kind(2), kind(2)])) is mlximpl.ArraysCache
        assert type(kind.from_state(([None], None, None))) is mlximpl.ArraysCache
        assert kind.__name__ == "ArraysCache"


# --- files ---------------------------------------------------------------------------------------


def test_caches_are_saved_and_loaded_by_mlx_lms_names(tmp_path: Path) -> None:
    ours, before = mlximpl.KVCache(), OWN["KVCache"]()
    for cache in (ours, before):
        cache.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 3, 4)))
    with mlximpl.install():
        theirs.save_prompt_cache(str(tmp_path / "ours"), [ours], {"a": "b"})
        theirs.save_prompt_cache(str(tmp_path / "before.safetensors"), [before])
        for name in ("ours", "before"):
            (loaded,), metadata = theirs.load_prompt_cache(str(tmp_path / f"{name}.safetensors"), True)
            assert type(loaded) is mlximpl.KVCache and loaded.offset == 3
            assert metadata == ({"a": "b"} if name == "ours" else {})
    assert theirs.load_prompt_cache(str(tmp_path / "ours.safetensors"))[0].offset == 3


@pytest.mark.parametrize("options", [[], ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]])
def test_the_commands_that_prompt_and_generate(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = str(save_model("llama", tmp_path / "llama", head_dim=32))
    file = tmp_path / "prompt.safetensors"

    def run(command: Any, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mlx_lm", *arguments, *options])
        command.main()
        return capsys.readouterr().out

    how = ["--max-tokens", "9", "--temp", "0", "--verbose", "False"]
    expected = run(generate, "--model", model, "--prompt", "t5 t9 t1 t7 t3", *how)
    with mlximpl.install():
        assert run(generate, "--model", model, "--prompt", "t5 t9 t1 t7 t3", *how) == expected
        run(cache_prompt, "--model", model, "--prompt", "t5 t9 t1", "--prompt-cache-file", str(file))
        again = run(generate, "--prompt", "t7 t3", "--prompt-cache-file", str(file), *how)
    assert again == expected
    kind = mlximpl.QuantizedKVCache if options else mlximpl.KVCache
    assert {type(cache) for cache in mlximpl.load_prompt_cache(file)} == {kind}
