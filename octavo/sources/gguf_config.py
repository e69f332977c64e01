"""Turns a GGUF file's metadata into the contents of config.json and generation_config.json.

One function per architecture, in a table: to add one, write its function and name it there. Whatever a
file states that would change the arithmetic and has no translation is refused, never dropped.
"""

import math
import struct
from collections.abc import Callable, Mapping

from octavo.sources.gguf_header import GgufError, GgufHeader

JsonObject = dict[str, object]

_F32_TYPE_ID = 0
# Llama 3.1's frequency scaling: https://arxiv.org/abs/2407.21783 and the release's model code.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT_TOKENS = 8192


def model_config(header: GgufHeader) -> JsonObject:
    """config.json for this file. Raises `GgufError` naming an architecture or a field not supported."""
    translate = _ARCHITECTURES.get(header.architecture)
    if translate is None:
        raise GgufError(
            header.path,
            f"architecture {header.architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}",
        )
    return translate(header)


def generation_config(header: GgufHeader) -> JsonObject:
    """generation_config.json: the ids that begin and end a text, each one the file marks as an end."""
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {header.integer(f"tokenizer.ggml.{key}") for key in end_keys if f"tokenizer.ggml.{key}" in header.metadata}
    config: JsonObject = {}
    if "tokenizer.ggml.bos_token_id" in header.metadata:
        config["bos_token_id"] = header.integer("tokenizer.ggml.bos_token_id")
    if ends:
        config["eos_token_id"] = sorted(ends)
    return config


def _llama(header: GgufHeader) -> JsonObject:
    config = _decoder(header)
    config["model_type"] = "llama"
    config["architectures"] = ["LlamaForCausalLM"]
    config["hidden_act"] = "silu"
    config["attention_bias"] = "blk.0.attn_q.bias" in header.by_name
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in header.by_name
    config["rope_scaling"] = _rope_scaling(header)
    if header.integer("llama.expert_count", 0):
        raise GgufError(header.path, "llama.expert_count is not 0; mixtures of experts are not supported")
    return config


def _decoder(header: GgufHeader) -> JsonObject:
    """The fields that decoder-only families share, under Hugging Face's names."""
    arch = header.architecture
    embedding = header.by_name.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(header.path, "tensor token_embd.weight is absent or has not two dimensions")
    num_heads = header.integer(f"{arch}.attention.head_count")
    hidden_size = header.integer(f"{arch}.embedding_length")
    head_dim = header.integer(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    rotary_dim = header.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise GgufError(
            header.path,
            f"{arch}.rope.dimension_count is {rotary_dim} and a head has {head_dim} dimensions; "
            "partial rotary embeddings are not supported",
        )
    return {
        "hidden_size": hidden_size,
        "intermediate_size": header.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": header.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": header.number(f"{arch}.rope.freq_base", 10000.0),
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        # The rows of the matrix are the authority: metadata may count fewer tokens than were padded.
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.by_name,
        "torch_dtype": "bfloat16",
        **_token_ids(header),
    }


def _token_ids(header: GgufHeader) -> JsonObject:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {
        ours: header.integer(f"tokenizer.ggml.{theirs}")
        for ours, theirs in names.items()
        if f"tokenizer.ggml.{theirs}" in header.metadata
    }


def _rope_scaling(header: GgufHeader) -> JsonObject | None:
    arch = header.architecture
    if "rope_freqs.weight" in header.by_name:
        return _llama3_scaling(header)
    kind = header.metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = header.number(f"{arch}.rope.scaling.factor", header.number(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" and f"{arch}.rope.scale_linear" not in header.metadata:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "yarn":
        original = header.integer(f"{arch}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise GgufError(header.path, f"{arch}.rope.scaling.type is {kind!r}; supported: none, linear, yarn")


def _llama3_scaling(header: GgufHeader) -> JsonObject | None:
    """Recover Llama 3's scaling parameters from the divisors the file stores in rope_freqs.weight."""
    divisors = _read_float32(header, "rope_freqs.weight")
    factor = max(divisors)
    if all(divisor == 1.0 for divisor in divisors):
        return None
    theta = header.number(f"{header.architecture}.rope.freq_base", 10000.0)
    expected = [_llama3_divisor(theta ** (-i / len(divisors)), factor) for i in range(len(divisors))]
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


def _llama3_divisor(frequency: float, factor: float) -> float:
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
    if tensor.type_id != _F32_TYPE_ID or not 0 < num_values <= 4096:
        raise GgufError(header.path, f"tensor {name} has shape {tensor.shape}, type {tensor.type_id}")
    with header.path.open("rb") as stream:
        stream.seek(tensor.offset_bytes)
        data = stream.read(4 * num_values)
    if len(data) < 4 * num_values:
        needed = tensor.offset_bytes + 4 * num_values
        raise GgufError(header.path, f"tensor {name} needs {needed:,} bytes of {header.file_bytes:,}", needed)
    return struct.unpack(f"<{num_values}f", data)


_ARCHITECTURES: Mapping[str, Callable[[GgufHeader], JsonObject]] = {"llama": _llama}
