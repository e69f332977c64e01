"""Converts the tensors of a GGUF file into one safetensors file.

Tensors are dequantized a slice of rows at a time: memory stays small however large the model is. It knows
the two containers and ggml's types, not where the file is kept nor which model it is.
"""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
import torch

from octavo.sources.cache import require_free_bytes
from octavo.sources.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from worker_svc.weights.checkpoint import WeightsError
from worker_svc.weights.gguf_tensors import LAYOUTS, GgufLayout, deinterleaved_rows, is_derived

_SLICE_ITEMS = 1 << 22

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Conversion:
    """One tensor's way: `order` are the stored rows in the order to write them, None for as they are.

    `offset` is taken from every stored value.
    """

    tensor: GgufTensor
    name: str
    order: npt.NDArray[np.intp] | None
    offset: float


def convert_gguf_weights(path: Path, dtype: torch.dtype, built: Path, safetensors_type: str) -> None:
    """Write the weights of `path` in `dtype` to `built`; `safetensors_type` is the container's word for it.

    Raises `WeightsError` naming tensors or types that cannot be converted, or values that `dtype` cannot
    hold, and `SourceError` for disk space that is missing.
    """
    header = read_gguf_header(path)
    conversions = _plan(header)
    num_items = sum(math.prod(conversion.tensor.shape) for conversion in conversions)
    num_bytes = num_items * dtype.itemsize
    require_free_bytes(built.parent, num_bytes, f"converting {path.name} to {dtype}")
    _log.info("converting %s to %s, once: %d tensors, %d MB", path, dtype, len(conversions), num_bytes >> 20)
    with built.open("wb") as stream:
        stream.write(_safetensors_header(conversions, safetensors_type, dtype.itemsize))
        for conversion in conversions:
            _write_tensor(stream, path, conversion, dtype)


def _plan(header: GgufHeader) -> list[_Conversion]:
    layout = LAYOUTS.get(header.architecture)
    if layout is None:
        raise WeightsError(
            f"{header.path}: weights of architecture {header.architecture!r} are not supported; "
            f"supported: {', '.join(LAYOUTS)}"
        )
    wanted = [tensor for tensor in header.tensors if not is_derived(tensor.name)]
    names = {tensor.name: layout.huggingface_name(tensor.name) for tensor in wanted}
    if unknown := [name for name, ours in names.items() if ours is None]:
        raise WeightsError(f"{header.path}: tensors of no known place in {header.architecture!r}: {', '.join(unknown)}")
    _require_dequantizable(header, wanted)
    return [
        _Conversion(tensor, name, _order(header, layout, tensor), layout.offset_of(tensor.name))
        for tensor in wanted
        if (name := names[tensor.name]) is not None
    ]


def _order(header: GgufHeader, layout: GgufLayout, tensor: GgufTensor) -> npt.NDArray[np.intp] | None:
    num_heads = header.integer(f"{header.architecture}.attention.head_count")
    num_kv_heads = header.integer(f"{header.architecture}.attention.head_count_kv", num_heads)
    heads_in = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(tensor.name.split(".")[-2])
    if heads_in is None or not layout.interleaves_rotary_pairs:
        return None
    num_rows = tensor.shape[0]
    if heads_in <= 0 or num_rows % (2 * heads_in):
        raise WeightsError(
            f"{header.path}: tensor {tensor.name} has {num_rows} rows, which {heads_in} heads cannot share"
        )
    return deinterleaved_rows(num_rows, heads_in)


def _require_dequantizable(header: GgufHeader, tensors: list[GgufTensor]) -> None:
    for type_id in {tensor.type_id for tensor in tensors}:
        affected = [tensor.name for tensor in tensors if tensor.type_id == type_id]
        try:
            ggml_type = gguf.GGMLQuantizationType(type_id)
            _, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
            gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), ggml_type)
        except (ValueError, KeyError, NotImplementedError) as error:
            known = [known.name for known in gguf.GGMLQuantizationType if known == type_id]
            raise WeightsError(
                f"{header.path}: {len(affected)} tensors, {affected[0]} the first, have ggml type "
                f"{known[0] if known else type_id}, which the gguf package cannot dequantize"
            ) from error


def _safetensors_header(conversions: list[_Conversion], safetensors_type: str, item_bytes: int) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for conversion in conversions:
        end = begin + math.prod(conversion.tensor.shape) * item_bytes
        entries[conversion.name] = {
            "dtype": safetensors_type,
            "shape": list(conversion.tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, path: Path, conversion: _Conversion, dtype: torch.dtype) -> None:
    for values in _dequantized(path, conversion):
        converted = values.to(dtype)
        if dtype is torch.float16 and bool((converted.isinf() & values.isfinite()).any()):
            raise WeightsError(
                f"{path}: tensor {conversion.tensor.name} holds {values.abs().max().item():g}, more than "
                "float16 can; use --dtype bfloat16 or float32"
            )
        stream.write(converted.contiguous().view(torch.uint8).numpy().data)


def _dequantized(path: Path, conversion: _Conversion) -> Iterator[torch.Tensor]:
    """The tensor's values in float32, flat, a slice of rows at a time, in the order to be written."""
    tensor = conversion.tensor
    ggml_type = gguf.GGMLQuantizationType(tensor.type_id)
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    # A vector of n is n rows of one item where it is reordered, and one row of n otherwise: a block
    # never spans rows.
    row_items = tensor.shape[-1] if len(tensor.shape) > 1 or conversion.order is None else 1
    if row_items % block_items:
        raise WeightsError(
            f"{path}: tensor {tensor.name} of shape {tensor.shape} is cut within {ggml_type.name} blocks"
        )
    num_rows = math.prod(tensor.shape) // row_items
    row_bytes = row_items // block_items * block_bytes
    stored = np.memmap(path, mode="r", dtype=np.uint8, offset=tensor.offset_bytes, shape=(num_rows, row_bytes))
    rows_at_once = max(1, _SLICE_ITEMS // row_items)
    for start in range(0, num_rows, rows_at_once):
        stop = min(start + rows_at_once, num_rows)
        rows = slice(start, stop) if conversion.order is None else conversion.order[start:stop]
        values = gguf.dequantize(np.ascontiguousarray(stored[rows]), ggml_type)
        if conversion.offset:
            values = values - np.float32(conversion.offset)
        yield torch.from_numpy(np.require(values.reshape(-1), np.float32, ["C", "W"]))
