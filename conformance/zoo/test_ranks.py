"""Two ranks of MLX's own distributed engine, on this machine: each row equals the row on one rank."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="the models are mlx-lm's")

ROOT = Path(__file__).resolve().parents[2]
TWO_GPUS = mx.cuda.is_available() and mx.device_count(mx.gpu) > 1


def launch(backend: str, *words: str) -> str:
    """What two ranks print. mlx.launch stands beside the interpreter and ends with 0 whatever the ranks end with."""
    command = [Path(sys.executable).with_name("mlx.launch"), "-n", "2", "--backend", backend]
    if backend == "ring":
        command += ["--starting-port", str(two_free_ports())]
    command += ["--env", f"PYTHONPATH={ROOT}", "--cwd", ROOT, "--", sys.executable, "-m", "conformance.zoo.ranks"]
    done = subprocess.run([*map(str, command), *words], capture_output=True, text=True, timeout=300, check=False)
    return done.stdout + done.stderr


def two_free_ports() -> int:
    """The first of two neighbouring ports that nothing listens on: mlx.launch gives each rank the next one."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
    raise RuntimeError("no two free ports side by side")


def equal_rows(printed: str) -> list[tuple[str, ...]]:
    line = r"rank (\d) of 2: (\w+), (\d of \d) heads in a cache, (\d+ of \d+) rows equal one rank's"
    return sorted(re.findall(line, printed))


def test_two_ranks_over_the_loopback_interface() -> None:
    printed = launch("ring", "llama", "gpt_oss", "--schedules", "one_token_segments", "late_rows", "reloaded")
    expected = [(rank, name, "1 of 2", "20 of 20") for rank in "01" for name in ("gpt_oss", "llama")]
    assert equal_rows(printed) == expected, printed
    assert "FAILED" not in printed


@pytest.mark.skipif(not TWO_GPUS, reason="NCCL needs two NVIDIA GPUs")
def test_two_ranks_over_nccl() -> None:
    printed = launch("nccl", "llama", "--schedules", "one_token_segments", "late_rows")
    assert equal_rows(printed) == [(rank, "llama", "1 of 2", "12 of 12") for rank in "01"], printed
