"""Build the wheel, look into it, install it alone and import it.

Run from a checkout with the ``dev`` extra: ``python -m conformance.check_wheel``. The wheel
must hold the package ``mlximpl`` and nothing else of the checkout, and need MLX alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent

# Run in the fresh environment, from outside the checkout.
PROBE = """
import sys
import mlximpl
assert "numpy" not in sys.modules, "import mlximpl imports numpy"
print(mlximpl.__file__)
"""


class Failed(Exception):
    """A command failed; its message is one line."""


def run(what: str, *command: str, cwd: Path) -> str:
    done = subprocess.run(command, check=False, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise Failed(f"{what} failed: {lines[-1].strip()}")
    return done.stdout


def build(tmp: Path) -> Path:
    # From a copy: setuptools would leave build/ and *.egg-info in the checkout, and would pack
    # whatever an earlier build had left in build/lib.
    source = tmp / "source"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignore)
    run("the build", sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp), cwd=source)
    wheels = list(tmp.glob("*.whl"))
    if len(wheels) != 1:
        raise Failed(f"the build made {len(wheels)} wheels, not 1")
    return wheels[0]


def problems(wheel: Path) -> list[str]:
    """What is wrong with the files and the metadata of a wheel, one line each."""
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info/"
    metadata = BytesParser().parsebytes(files[info + "METADATA"])
    found = []

    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mlximpl").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__" and path.name[0] != "."
    } | {"mlximpl/py.typed"}
    packed = {name for name in files if not name.startswith(info)}
    found += [f"it lacks {name}" for name in sorted(package - packed)]
    found += [f"it holds {name}" for name in sorted(packed - package)]

    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    plain = sorted(r.name for r in requirements if "extra ==" not in str(r.marker))
    if plain != ["mlx"]:
        found.append(f"without extras it requires {', '.join(plain) or 'nothing'}, not mlx alone")
    if metadata["Requires-Python"] != ">=3.10":
        found.append(f"Requires-Python is {metadata['Requires-Python']}, not >=3.10")
    if metadata["License-Expression"] != "MIT":
        found.append(f"License-Expression is {metadata['License-Expression']}, not MIT")
    if files.get(info + "licenses/LICENSE") != (ROOT / "LICENSE").read_bytes():
        found.append("the checkout's LICENSE is not in it")
    return found


def check_import(wheel: Path, tmp: Path) -> None:
    """Install the wheel in a fresh environment and import it from outside the checkout."""
    env = tmp / "env"
    python = str(env / "bin" / "python")
    run("venv", sys.executable, "-m", "venv", str(env), cwd=tmp)
    # The extra adds mlx[cpu] on Linux, where MLX alone has no backend, and nothing elsewhere.
    run("pip", python, "-m", "pip", "install", "-q", f"{wheel}[cpu]", cwd=tmp)
    where = run("import mlximpl", python, "-I", "-c", PROBE, cwd=tmp).strip()
    if not Path(where).resolve().is_relative_to(env.resolve()):
        raise Failed(f"import mlximpl found {where}, not the installed wheel")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        try:
            wheel = build(tmp)
            found = problems(wheel)
            for problem in found:
                print(f"{wheel.name}: {problem}")
            if found:
                return 1
            check_import(wheel, tmp)
        except Failed as failure:
            print(f"wheel check: {failure}")
            return 1
        print(f"{wheel.name}: mlximpl alone, needs mlx alone, imports without numpy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
