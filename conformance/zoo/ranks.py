"""Tensor parallel: each rank has a part of the heads, and a batched cache of its own for them.

    mlx.launch -n 2 --backend ring python -m conformance.zoo.ranks [family ...] [--schedules NAME ...]
    mlx.launch -n 2 --backend nccl python -m conformance.zoo.ranks

Every rank runs the schedules on its part of a model, divided by the model's own `shard`, and compares each row with
the row alone on the whole model, which it has beside it. Prints a line a family and rank. The exit code of a rank is 1
where a row differs; mlx.launch itself ends with 0 all the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from conformance.adapters.surface import set_device
from conformance.zoo.alone import Alone
from conformance.zoo.families import BY_NAME
from conformance.zoo.implementations import caches_of
from conformance.zoo.judge import judge
from conformance.zoo.models import make_model
from conformance.zoo.run import chosen
from conformance.zoo.schedules import Schedule

DIVIDED = ("llama", "qwen3", "gpt_oss", "deepseek_v3", "longcat_flash")
"""Families of the zoo whose model code can be divided."""


def heads(model: Any) -> list[int]:
    """How many heads of keys each cache of a model holds, children of lists one by one."""
    import mlx.core as mx

    caches = caches_of("mlximpl").make(model)
    mx.eval(model(mx.array([[1, 2]]), cache=caches))
    children = [each for cache in caches for each in getattr(cache, "caches", (cache,))]
    return [int(cache.keys.shape[1]) for cache in children]


def run(name: str, schedules: Sequence[Schedule], group: Any) -> bool:
    """The schedules on this rank's part of a family's model; whether each row equals the row alone on the whole."""
    whole, part = make_model(name), make_model(name)
    part.shard(group)
    alone = Alone(whole)
    cells = [judge(alone, BY_NAME[name], schedule, caches_of("mlximpl"), model=part) for schedule in schedules]
    rows, equal = sum(cell.rows for cell in cells), sum(cell.equal for cell in cells)
    print(
        f"rank {group.rank()} of {group.size()}: {name}, {heads(part)[0]} of {heads(whole)[0]} heads in a cache, "
        f"{equal} of {rows} rows equal one rank's, log-probabilities within {max(cell.worst for cell in cells):.1e}",
        flush=True,
    )
    for cell in cells:
        for fault in cell.faults:
            print(f"FAILED {cell.schedule}, row {fault.row}: {fault.what}", flush=True)
    return equal == rows > 0


def main(argv: Sequence[str]) -> int:
    """Run on this rank; its exit code."""
    import mlx.core as mx

    parser = argparse.ArgumentParser(prog="python -m conformance.zoo.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=DIVIDED, help=f"of {', '.join(DIVIDED)}; all without")
    parser.add_argument("--schedules", nargs="+", default=[], metavar="NAME", help="parts of names; all without")
    arguments = parser.parse_args(argv)
    _, schedules = chosen([], arguments.schedules)
    set_device()
    group = mx.distributed.init(strict=True)
    equal = [run(name, schedules, group) for name in arguments.families]  # every rank runs all: the others wait for it
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
