"""One mutated file: loaded in each way, and judged.

Files with checksums, which mlximpl writes: the same cache, bit for bit, and the same metadata, or PromptCacheFileError
that names the file. A mapped load that does not verify may show changed numbers, and nothing else. Files without
checksums (mlx-lm's), and those whose header was sealed again: caches that work, or the refusal.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx

from conformance.file_layers import leaves
from conformance.file_seeds import Seed, has_seal, reseal
from conformance.mutations import MUTATIONS, RESEALED, WEIGHTS, Draw

MODES: dict[str, dict[str, bool]] = {
    "read": {},
    "mapped": {"mmap": True},
    "verified": {"mmap": True, "verify": True},
}
SPARE = 64 * 2**20
"""Bytes of memory that a load may take beside twice its file."""
ADDRESS_SPACE = 4 * 2**30
"""Bytes of address space that all loads of a process may take; Linux alone."""
EQUAL, REFUSED, LAWFUL, FOUND = "equal", "refused", "lawful", "findings"
SECOND = 0.15
"""How often a file is changed twice."""


@dataclass(frozen=True)
class Case:
    """A file made wrong."""

    number: int
    seed: Seed
    mutations: tuple[str, ...]
    content: bytes

    @property
    def sealed(self) -> bool:
        """Whether any change must show: there is a checksum, and it was not made anew."""
        return self.seed.sealed and not any(name in RESEALED for name in self.mutations) and has_seal(self.content)


@dataclass(frozen=True)
class Finding:
    """What a load did that it must not."""

    kind: str
    """What makes two findings the same."""
    words: str
    number: int = 0
    file: str = ""


@dataclass
class Verdict:
    """What the loads of a file did."""

    number: int
    mutations: tuple[str, ...]
    outcomes: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    growth: int = 0
    """By how many bytes the most that the process held has grown."""


def case(every: list[Seed], seed: int, number: int) -> Case:
    """The same file for the same numbers, as long as the seeds are the same."""
    random = Random(f"{seed}/{number}")
    of = random.choice(every)
    mutations = MUTATIONS | (RESEALED if of.sealed else {})
    names = list(mutations)
    weights = [WEIGHTS.get(name.removesuffix("-resealed"), 1) for name in names]
    draw = Draw(random, [other.content for other in every], reseal)
    content, chosen = of.content, []
    for _ in range(2 if random.random() < SECOND else 1):
        chosen += random.choices(names, weights)
        content = mutations[chosen[-1]](draw, content)
    # Parts of two files may be the whole of the other.
    of = next((other for other in every if other.content == content), of)
    return Case(number, of, tuple(chosen), content)


class Judge:
    """Loads files and says what is wrong with what came of it."""

    def __init__(self, every: list[Seed], loader: Any, directory: Path) -> None:
        self.loader = loader
        self.directory = directory
        self.right: dict[str, tuple[Any, Any]] = {}
        for number, seed in enumerate(every):
            path = directory / f"right-{number}.safetensors"
            path.write_bytes(seed.content)
            for options in MODES.values():
                caches, metadata = self.loader.load_prompt_cache(str(path), return_metadata=True, **options)
                self.right[seed.name] = (leaves(caches), metadata)
                work(caches)
            path.unlink()
        self.memory = Memory()
        self.growth = 0
        self.largest = 0
        limit_address_space()

    def judge(self, of: Case) -> Verdict:
        """Load a file in each mode."""
        path = self.directory / f"case-{of.number}.safetensors"
        path.write_bytes(of.content)
        self.largest = max(self.largest, len(of.content))
        verdict = Verdict(of.number, of.mutations)
        self.growth = 0
        for mode, options in MODES.items():
            try:
                verdict.outcomes[mode] = self._load(of, path, mode, options)
            except Wrong as wrong:
                verdict.outcomes[mode] = FOUND
                verdict.findings.append(Finding(wrong.kind, f"{mode}: {wrong}", of.number))
        path.unlink()
        largest = len(of.content) if self.memory.precise else self.largest
        if self.growth > SPARE + 2 * largest:
            words = f"{self.growth} bytes of memory for a file of {len(of.content)}"
            verdict.findings.append(Finding("memory", words, of.number))
        verdict.growth = self.growth
        return verdict

    def _load(self, of: Case, path: Path, mode: str, options: dict[str, bool]) -> str:
        self.memory.begin()
        try:
            try:
                caches, metadata = self.loader.load_prompt_cache(str(path), return_metadata=True, **options)
            finally:
                self.growth = max(self.growth, self.memory.growth())
        except self.loader.PromptCacheFileError as refusal:
            if path.name not in str(refusal) or not isinstance(refusal, ValueError):
                raise Wrong("refusal", f"a refusal that does not name the file: {refusal}") from refusal
            return REFUSED
        except BaseException as error:
            raise Wrong(where(error), f"{type(error).__name__}: {str(error)[:300]}") from error
        if not isinstance(caches, list) or not caches:
            raise Wrong("nothing", f"{str(caches)[:100]} instead of caches")
        if not isinstance(metadata, dict) or not all(isinstance(x, str) for pair in metadata.items() for x in pair):
            raise Wrong("metadata", f"metadata {str(metadata)[:100]}")
        try:
            held = leaves(caches)
        except Exception as error:
            raise Wrong(where(error), f"the caches have no state: {type(error).__name__}: {error}") from error
        outcome = self._compared(of, mode, held, metadata)
        try:
            work(caches)
        except Exception as error:
            raise Wrong(where(error), f"the caches do not go on: {type(error).__name__}: {error}") from error
        return outcome

    def _compared(self, of: Case, mode: str, held: list[Any], metadata: Any) -> str:
        should, said = self.right[of.seed.name]
        if (held, metadata) == (should, said):
            return EQUAL
        if of.sealed:
            if mode == "mapped" and "splice" in of.mutations:
                return LAWFUL  # a whole header may stand before other data
            if mode == "mapped" and metadata == said and structure(held) == structure(should):
                return LAWFUL
            raise Wrong(f"another cache, {mode}", f"{difference((held, metadata), (should, said))}")
        if sum(len(leaf[2]) for leaf in held if isinstance(leaf, tuple)) > len(of.content):
            raise Wrong("more than there is", f"caches of more bytes than the {len(of.content)} of the file")
        if of.mutations == ("flip-data",) and kinds(held) != kinds(should):
            raise Wrong("other kinds", f"{kinds(held)}, but the header says {kinds(should)}")
        return LAWFUL


class Wrong(Exception):
    """What a load did that it must not. `kind` makes two of them the same."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def where(error: BaseException) -> str:
    """The kind of an exception, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "mlximpl" in Path(frame.filename).parts] or frames
    return f"{type(error).__name__} at {Path(inside[-1].filename).name}:{inside[-1].lineno}"


def structure(held: list[Any]) -> list[Any]:
    """The leaves without the arrays' bits."""
    return [leaf[:2] if isinstance(leaf, tuple) else leaf for leaf in held]


def kinds(held: list[Any]) -> list[str]:
    """The classes among the leaves."""
    return [leaf for leaf in held if isinstance(leaf, str) and leaf.endswith(("Cache", "CacheList"))]


def difference(got: tuple[list[Any], Any], should: tuple[list[Any], Any]) -> str:
    """The first one, in words."""
    if got[1] != should[1]:
        return f"metadata {str(got[1])[:200]}, but should be {str(should[1])[:200]}"
    for mine, right in zip(got[0], should[0], strict=False):
        if mine != right:
            return f"{str(mine)[:200]}, but should be {str(right)[:200]}"
    return f"{len(got[0])} leaves, but should be {len(should[0])}"


def work(caches: list[Any]) -> None:
    """Ask each cache what it holds and feed it a token, which it may refuse with ValueError or IndexError."""
    for cache in caches:
        repr(cache), cache.nbytes, cache.empty(), cache.is_trimmable()
        if hasattr(cache, "caches"):
            work(list(cache.caches))
            continue
        try:
            tokens = next_token(cache)
            if tokens is not None:
                mx.eval(cache.update_and_fetch(*tokens))
        except (ValueError, IndexError):
            continue


def next_token(cache: Any) -> tuple[mx.array, mx.array] | None:
    """Zeros that fit the cache's keys and values, or None where it has none."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if keys is None or values is None:
        return None
    if isinstance(keys, list | tuple):
        sizes = [x[0].shape[3] * 32 // cache.bits for x in (keys, values)]
        first, dtype = keys[0], keys[1].dtype
    else:
        sizes, first, dtype = [keys.shape[3], values.shape[3]], keys, keys.dtype
    rows, heads = first.shape[:2]
    made = [mx.zeros((rows, heads, 1, size), dtype) for size in sizes]
    return made[0], made[1]


# -- memory ---------------------------------------------------------------------------------------


class Memory:
    """By how many bytes the most that this process held at once has grown.

    On Linux since `begin`: the kernel's mark is set back there. Elsewhere the mark of a process only rises, so growth
    is counted from the first `begin` on.
    """

    def __init__(self) -> None:
        self.start = 0
        self.precise = False

    def begin(self) -> None:
        """Start anew, if that can be done."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.precise = True
        except OSError:
            self.precise = False
        if self.precise or not self.start:
            self.start = self._peak()

    def growth(self) -> int:
        """In bytes."""
        return max(0, self._peak() - self.start)

    def _peak(self) -> int:
        if self.precise:
            status = Path("/proc/self/status").read_text()
            return 1024 * int(status.split("VmHWM:")[1].split()[0])
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, Linux kilobytes


def limit_address_space() -> None:
    """On Linux, let an allocation of what a header merely claims fail at once, instead of swapping.

    A GPU's driver claims far more for itself.
    """
    if sys.platform == "linux" and mx.default_device() == mx.cpu:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
