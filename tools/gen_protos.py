"""Generates the Python stubs of protos/ in their places under octavo/.

With --check, generates into a temporary directory and fails when the committed stubs differ.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def generate(out: Path) -> list[Path]:
    """Writes stubs and typings of every proto under `out` and returns their paths."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", f"--python_out={out}"]
    command += [f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"]
    plugins = Path(sys.executable).parent
    command += [f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    subprocess.run([*command, *map(str, PROTOS)], check=True)
    stems = [out / proto.relative_to(ROOT / "protos").with_suffix("") for proto in PROTOS]
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
    return [path for stem in stems for end in endings if (path := stem.with_name(stem.name + end)).exists()]


def stale_files() -> list[Path]:
    """The committed stubs that differ from what protos/ generates now."""
    with tempfile.TemporaryDirectory() as name:
        fresh = generate(Path(name))
        pairs = [(path, ROOT / path.relative_to(name)) for path in fresh]
        return [ours for path, ours in pairs if not ours.exists() or not filecmp.cmp(path, ours, shallow=False)]


def main() -> int:
    if "--check" not in sys.argv:
        generate(ROOT)
        return 0
    stale = stale_files()
    for path in stale:
        print(f"{path.relative_to(ROOT)} is not what protos/ generates; run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
