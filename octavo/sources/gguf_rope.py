"""Rotary scaling of a GGUF file, as Hugging Face's `rope_scaling` says it.

A file states it in metadata fields or as a table of divisors, one for each pair of dimensions. What has no
translation is refused, never dropped.
"""

import math
import struct

from octavo.sources.gguf_header import GgufError, GgufHeader

JsonObject = dict[str, object]

_F32_TYPE_ID = 0
_MAX_DIVISORS = 4096
# Llama 3.1's frequency scaling: https://arxiv.org/abs/2407.21783 and the release's model code.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT_TOKENS = 8192
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Factors on the attention's temperature, by which a file replaces what YaRN and Hugging Face compute.
_YARN_TEMPERATURES = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")


def rope_scaling(header: GgufHeader) -> JsonObject | None:
    """The scaling of every family but Phi-3; None for none. Raises `GgufError` for one not supported."""
    arch = header.architecture
    _refuse_tables(header)
    if "rope_freqs.weight" in header.by_name:
        return _llama3_scaling(header)
    kind = header.metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = header.number(f"{arch}.rope.scaling.factor", header.number(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" and f"{arch}.rope.scale_linear" not in header.metadata:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        return _yarn_scaling(header, factor)
    raise GgufError(header.path, f"{arch}.rope.scaling.type is {kind!r}; supported: none, linear, yarn")


def long_rope_scaling(header: GgufHeader) -> JsonObject | None:
    """Phi-3's scaling (LongRoPE, https://arxiv.org/abs/2402.13753): two tables of divisors, or none.

    Raises `GgufError` for any other kind: Phi-3 has no other.
    """
    arch = header.architecture
    if _LONG not in header.by_name and _SHORT not in header.by_name:
        kind = header.metadata.get(f"{arch}.rope.scaling.type", "none")
        if kind != "none" or "rope_freqs.weight" in header.by_name:
            raise GgufError(header.path, f"{arch}.rope.scaling.type is {kind!r} without tensors {_LONG} and {_SHORT}")
        return None
    for name in (_LONG, _SHORT):
        if name not in header.by_name:
            raise GgufError(header.path, f"tensor {name} is absent and its companion is there")
    scaling: JsonObject = {
        "rope_type": "longrope",
        "long_factor": list(_read_float32(header, _LONG)),
        "short_factor": list(_read_float32(header, _SHORT)),
    }
    stated = header.number(f"{arch}.rope.scaling.attn_factor", 1.0)
    # The rounding of a float32 in the file is no difference.
    if not math.isclose(stated, _long_rope_temperature(header), rel_tol=1e-6):
        scaling["attention_factor"] = stated
    return scaling


def _long_rope_temperature(header: GgufHeader) -> float:
    """The factor on sines and cosines that Hugging Face computes where the configuration has none."""
    context = header.integer(f"{header.architecture}.context_length")
    original = header.integer(f"{header.architecture}.rope.scaling.original_context_length")
    if context <= original or original < 2:
        return 1.0
    return math.sqrt(1 + math.log(context / original) / math.log(original))


def _yarn_scaling(header: GgufHeader, factor: float) -> JsonObject:
    prefix = f"{header.architecture}.rope.scaling"
    for name in _YARN_TEMPERATURES:
        if (stated := header.number(f"{prefix}.{name}", 1.0)) != 1.0:
            raise GgufError(header.path, f"{prefix}.{name} is {stated:g}; supported: 1 or absent")
    scaling: JsonObject = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": header.integer(f"{prefix}.original_context_length"),
    }
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"{prefix}.{theirs}" in header.metadata:
            scaling[ours] = header.number(f"{prefix}.{theirs}")
    return scaling


def _refuse_tables(header: GgufHeader) -> None:
    for name in (_LONG, _SHORT):
        if name in header.by_name:
            raise GgufError(
                header.path, f"tensor {name} in architecture {header.architecture!r}; supported: in 'phi3' alone"
            )


def _llama3_scaling(header: GgufHeader) -> JsonObject | None:
    """Recover Llama 3's scaling parameters from the divisors the file stores in rope_freqs.weight."""
    divisors = _read_float32(header, "rope_freqs.weight")
    factor = max(divisors)
    if all(divisor == 1.0 for divisor in divisors):
        return None
    theta = header.number(f"{header.architecture}.rope.freq_base", 10000.0)
    expected = [llama3_divisor(theta ** (-i / len(divisors)), factor) for i in range(len(divisors))]
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(divisors, expected, strict=True)):
        raise GgufError(
            header.path,
            "rope_freqs.weight does not follow Llama 3's scaling rule with an original context of "
            f"{_LLAMA3_ORIGINAL_CONTEXT_TOKENS} tokens; other frequency tables are not supported",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT_TOKENS,
    }


def llama3_divisor(frequency: float, factor: float) -> float:
    """By how much Llama 3 divides one rotary frequency (radians per position)."""
    wavelength = 2 * math.pi / frequency
    turns = _LLAMA3_ORIGINAL_CONTEXT_TOKENS / wavelength
    if turns > _LLAMA3_HIGH_FREQ_FACTOR:
        return 1.0
    if turns < _LLAMA3_LOW_FREQ_FACTOR:
        return factor
    blend = (turns - _LLAMA3_LOW_FREQ_FACTOR) / (_LLAMA3_HIGH_FREQ_FACTOR - _LLAMA3_LOW_FREQ_FACTOR)
    return 1.0 / ((1.0 - blend) / factor + blend)


def _read_float32(header: GgufHeader, name: str) -> tuple[float, ...]:
    tensor = header.by_name[name]
    num_values = math.prod(tensor.shape)
    if tensor.type_id != _F32_TYPE_ID or not 0 < num_values <= _MAX_DIVISORS:
        raise GgufError(header.path, f"tensor {name} has shape {tensor.shape}, type {tensor.type_id}")
    with header.path.open("rb") as stream:
        stream.seek(tensor.offset_bytes)
        data = stream.read(4 * num_values)
    if len(data) < 4 * num_values:
        needed = tensor.offset_bytes + 4 * num_values
        raise GgufError(header.path, f"tensor {name} needs {needed:,} bytes of {header.file_bytes:,}", needed)
    return struct.unpack(f"<{num_values}f", data)
