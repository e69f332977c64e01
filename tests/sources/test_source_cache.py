"""The cache builds an entry once, shows it whole or not at all, and remembers digests truthfully."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.sources import CacheUsage, SourceError, cache_usage
from octavo.sources.cache import cache_root, file_sha256, publish, remember_sha256, require_free_bytes

RACER = """
import sys
from pathlib import Path
from octavo.sources.cache import publish

def build(path):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    path.mkdir()
    for part in range(200):
        (path / str(part)).write_text("x" * 100)

print("ready", flush=True)
sys.stdin.read(1)
entry = publish(Path(sys.argv[1]), build, lambda path: path.is_dir())
print(sum(len(part.read_text()) for part in entry.iterdir()))
"""


def test_processes_that_race_build_once_and_see_it_whole(tmp_path: Path) -> None:
    target, log = tmp_path / "entries" / "entry", tmp_path / "log"
    command = [sys.executable, "-c", RACER, str(target), str(log)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    answers = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("g")
        racer.stdin.flush()
    for racer in racers:
        out, _ = racer.communicate(timeout=60)
        answers.append((racer.returncode, out))
    assert answers == [(0, "20000\n")] * 4
    assert log.read_text() == "built\n"
    assert sorted(path.name for path in target.parent.iterdir()) == ["entry", "entry.lock"]


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "entry"

    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        publish(target, fail, Path.exists)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]
    publish(target, lambda path: _write(path, "whole"), Path.exists)
    assert target.read_text() == "whole"


def test_an_entry_that_is_not_whole_and_what_a_killed_process_left_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "entry"
    target.write_text("hal")
    (tmp_path / ".entry.building-dead").mkdir()
    publish(target, lambda path: _write(path, "whole"), lambda path: path.exists() and path.read_text() == "whole")
    assert target.read_text() == "whole"
    assert not (tmp_path / ".entry.building-dead").exists()


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    path, root = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    assert file_sha256(path, root) == hashlib.sha256(b"one").hexdigest()
    remembered = "0" * 64
    path.write_bytes(b"two")
    remember_sha256(path, root, remembered)
    assert file_sha256(path, root) == remembered
    status = path.stat()
    path.write_bytes(b"six")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_sha256(path, root) == hashlib.sha256(b"six").hexdigest()


def test_a_damaged_memory_is_not_believed(tmp_path: Path) -> None:
    path, root = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    file_sha256(path, root)
    (memory,) = (root / "digests").iterdir()
    for content in ("", "{", "[]", '{"file": "another", "sha256": "' + "0" * 64 + '"}'):
        memory.write_text(content)
        assert file_sha256(path, root) == hashlib.sha256(b"one").hexdigest()


def test_the_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/octavo")
    monkeypatch.setenv("OCTAVO_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"
    assert cache_root(Path("/given")) == Path("/given")


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match=r"cannot be written .* set OCTAVO_CACHE"):
        publish(tmp_path / "file" / "entry", lambda path: _write(path, ""), lambda _: False)


def test_missing_disk_space_is_found_before_writing(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"converting needs 1,152,921,504,606,846,976 bytes"):
        require_free_bytes(tmp_path, 1 << 60, "converting")


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def test_usage_counts_every_file_and_none_where_there_is_no_cache(tmp_path: Path) -> None:
    assert cache_usage(tmp_path / "none") == CacheUsage(tmp_path / "none", 0, 0)
    old = tmp_path / "gguf" / "old"
    old.parent.mkdir()
    old.write_bytes(b"12345")
    remember_sha256(old, tmp_path, "0" * 64)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert cache_usage(tmp_path) == CacheUsage(tmp_path, len(files), sum(path.stat().st_size for path in files))
