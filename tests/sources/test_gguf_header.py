"""The GGUF header reader agrees with the gguf package, and a damaged header costs only an error."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.sources import ModelSource
from octavo.sources.gguf_header import GgufError, read_gguf_header
from tests.sources import tiny_gguf


def test_it_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = tiny_gguf.start_llama(path, 300)
    tiny_gguf.add_byte_level_vocabulary(writer, "default")
    writer.add_tensor("output.weight", np.zeros((300, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.zeros(5, dtype=np.float16))
    tiny_gguf.finish(writer)
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    assert ours.metadata == {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert [(t.name, t.shape, t.type_id, t.offset_bytes) for t in ours.tensors] == [
        (t.name, tuple(int(n) for n in reversed(t.shape)), t.tensor_type, t.data_offset) for t in theirs.tensors
    ]


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -300)
    writer.add_uint64("a.u64", 1 << 60)
    writer.add_int64("a.i64", -(1 << 60))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.texts", ["", "é", "🙂"])
    writer.add_custom_alignment(64)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    tiny_gguf.finish(writer)
    header = read_gguf_header(path)
    assert [header.metadata[f"a.{key}"] for key in ("u8", "i8", "u16", "i16", "u64", "i64", "f64", "bool")] == [
        200, -3, 60000, -300, 1 << 60, -(1 << 60), 0.1, True,
    ]  # fmt: skip
    assert header.metadata["a.ints"] == [1, -2, 3]
    assert header.texts("a.texts") == ["", "é", "🙂"]
    assert header.by_name["t"].shape == (2, 3)
    assert header.by_name["t"].offset_bytes % 64 == 0


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 12, 23, 24, 40, 100, 5_000, 1_000_000])
def test_a_header_cut_anywhere_is_refused(smollm2: ModelSource, tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2.weights.open("rb") as stream:
        path.write_bytes(stream.read(num_bytes))
    with pytest.raises(GgufError, match=r"cut\.gguf: ") as caught:
        read_gguf_header(path)
    if num_bytes > 4:
        assert f"has {num_bytes:,}" in str(caught.value)
        assert caught.value.expected_bytes is not None
        assert caught.value.expected_bytes > num_bytes


@pytest.mark.parametrize("claim", [1 << 20, 1 << 40, 1 << 60, (1 << 64) - 1])
@pytest.mark.parametrize("what", ["tensors", "metadata fields"])
def test_absurd_counts_are_refused_at_once(tmp_path: Path, what: str, claim: int) -> None:
    counts = (claim, 0) if what == "tensors" else (0, claim)
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, *counts) + b"\0" * 1000)
    with pytest.raises(GgufError, match=f"claims {claim:,} {what}"):
        read_gguf_header(path)


def test_absurd_lengths_inside_are_refused_at_once(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k"
    values = {
        "string": struct.pack("<IQ", 8, 1 << 60),
        "array of numbers": struct.pack("<IIQ", 9, 4, 1 << 60),
        "array of strings": struct.pack("<IIQ", 9, 8, 1 << 60),
    }
    for name, value in values.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + key + value + b"\0" * 64)
        with pytest.raises(GgufError, match="truncated or damaged"):
            read_gguf_header(path)


def test_versions_and_duplicates_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(GgufError, match="GGUF version 1 is not supported"):
        read_gguf_header(path)
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    with pytest.raises(GgufError, match="big-endian"):
        read_gguf_header(path)
    field = struct.pack("<Q", 1) + b"k" + struct.pack("<IB", 0, 1)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + field + field)
    with pytest.raises(GgufError, match="metadata field k appears twice"):
        read_gguf_header(path)


def test_flipped_bytes_never_cause_another_error(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "sound.gguf", 300)
    tiny_gguf.add_byte_level_vocabulary(writer, "default")
    tiny_gguf.finish(writer)
    sound = (tmp_path / "sound.gguf").read_bytes()
    choice = random.Random(7)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(sound)
        for _ in range(choice.randint(1, 4)):
            damaged[choice.randrange(4, 4000)] = choice.randrange(256)
        path.write_bytes(damaged)
        try:
            read_gguf_header(path)
        except GgufError:
            num_refused += 1
    assert num_refused > 50
