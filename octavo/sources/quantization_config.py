"""What a config.json says of quantized weights: which layouts are read, and a refusal that names the others.

Knows the fields of `quantization_config`; opens no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.sources.model_source import SourceError

SUPPORTED = (
    "awq (4 bits, version gemm)",
    "gptq (4 or 8 bits, with or without desc_act)",
    "fp8 (e4m3: one scale for a tensor, for a row, or for a block)",
    "compressed-tensors (float-quantized, int-quantized, pack-quantized, naive-quantized; 4 or 8 bits)",
)
_COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")


@dataclass(frozen=True)
class QuantizationConfig:
    """How the quantized tensors of a checkpoint are laid out."""

    # awq, gptq, fp8 or compressed-tensors.
    method: str
    # Of packed codes; None for compressed-tensors of both numbers, where each layer's shapes say it.
    bits: int | None = None
    # GPTQ's first format stores zero points less one.
    zero_offset: int = 0
    # Inputs that share a scale, of AWQ and GPTQ; None where they all do, or where the tensors alone say it.
    group_size: int | None = None
    # (rows, columns) that share a scale, where scales are for blocks.
    block: tuple[int, int] | None = None


def parse_quantization(config: Mapping[str, Any]) -> QuantizationConfig | None:
    """From the fields of a config.json; None for plain weights.

    Raises SourceError for a method, or a kind of one, that is not read, with the list of those that are.
    """
    fields = config.get("quantization_config")
    if not fields:
        return None
    method = str(fields.get("quant_method") or "").replace("_", "-")
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
    if method not in readers:
        raise _refusal(f"quant_method {method!r}" if method else "a config without quant_method")
    return readers[method](fields)


def _awq(fields: Mapping[str, Any]) -> QuantizationConfig:
    bits, version = fields.get("bits", fields.get("w_bit")), str(fields.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _refusal(f"awq of {bits} bits, version {version}")
    return QuantizationConfig("awq", 4, group_size=_group_size(fields, "q_group_size"))


def _gptq(fields: Mapping[str, Any]) -> QuantizationConfig:
    bits, layout = fields.get("bits"), str(fields.get("checkpoint_format") or "gptq")
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        raise _refusal(f"gptq of {bits} bits, checkpoint_format {layout}")
    return QuantizationConfig(
        "gptq", int(bits), zero_offset=1 if layout == "gptq" else 0, group_size=_group_size(fields)
    )


def _fp8(fields: Mapping[str, Any]) -> QuantizationConfig:
    kind = str(fields.get("fmt") or "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fp8 of format {kind}")
    return QuantizationConfig("fp8", block=_block(fields.get("weight_block_size")))


def _compressed(fields: Mapping[str, Any]) -> QuantizationConfig:
    groups = list((fields.get("config_groups") or {}).values())
    blocks, bits = set(), set()
    for group in groups:
        weights = group.get("weights") or {}
        layout = group.get("format") or fields.get("format")
        if layout not in _COMPRESSED_FORMATS or weights.get("num_bits") not in (4, 8):
            raise _refusal(f"compressed-tensors of format {layout} with {weights.get('num_bits')} bits")
        blocks.add(_block(weights.get("block_structure")))
        bits.add(int(weights["num_bits"]))
    if len(blocks) > 1:
        raise _refusal("compressed-tensors with groups of different block_structure")
    if (fields.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refusal("compressed-tensors with sparse weights")
    return QuantizationConfig(
        "compressed-tensors", bits.pop() if len(bits) == 1 else None, block=blocks.pop() if blocks else None
    )


def _group_size(fields: Mapping[str, Any], other_name: str = "group_size") -> int | None:
    size = fields.get("group_size", fields.get(other_name))
    if size is None or size == -1:  # one group over all inputs
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _refusal(f"group_size {size!r}")
    return size


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = value.lower().split("x")
    rows, columns = (int(size) for size in value)
    if rows < 1 or columns < 1:
        raise _refusal(f"a block of {rows} x {columns}")
    return rows, columns


def _refusal(what: str) -> SourceError:
    return SourceError(f"config.json: quantization_config: {what} is not supported; supported: {', '.join(SUPPORTED)}")
