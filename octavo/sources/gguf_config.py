"""Turns a GGUF file's metadata into the contents of config.json and generation_config.json.

One function per architecture, in a table: to add one, write its function and name it there. Whatever a
file states that would change the arithmetic and has no translation is refused, never dropped.
"""

from collections.abc import Callable, Mapping

from octavo.sources.gguf_header import GgufError, GgufHeader
from octavo.sources.gguf_rope import long_rope_scaling, rope_scaling

JsonObject = dict[str, object]

_GELU = "gelu_pytorch_tanh"
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Fields that change the arithmetic and have no translation, and the values at which they change nothing.
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Gemma releases whose attention scale follows the width of the model, by their number of blocks; all
# others follow the size of a head. GGUF has no field for it.
_GEMMA2_WIDE_BLOCKS, _GEMMA3_WIDE_BLOCKS = 46, 62
_GEMMA2_WINDOW_PERIOD, _GEMMA3_WINDOW_PERIOD = 2, 6


def model_config(header: GgufHeader) -> JsonObject:
    """config.json for this file. Raises `GgufError` naming an architecture or a field not supported."""
    translate = _ARCHITECTURES.get(header.architecture)
    if translate is None:
        raise GgufError(
            header.path,
            f"architecture {header.architecture!r} is not supported; supported: {', '.join(_ARCHITECTURES)}",
        )
    if (num_files := header.integer("split.count", 1)) > 1:
        raise GgufError(
            header.path,
            f"split.count is {num_files}: one of {num_files} files; join them with `llama-gguf-split --merge`",
        )
    if num_experts := header.integer(f"{header.architecture}.expert_count", 0):
        raise GgufError(
            header.path,
            f"{header.architecture}.expert_count is {num_experts}; mixtures of experts are not supported",
        )
    for field, neutral in _NEUTRAL_VALUES.items():
        value = header.metadata.get(f"{header.architecture}.{field}", neutral[0])
        if value not in neutral:
            allowed = " or ".join(f"{value:g}" if isinstance(value, float) else repr(value) for value in neutral)
            raise GgufError(header.path, f"{header.architecture}.{field} is {value!r}; supported: absent or {allowed}")
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
    """Llama, and Mistral, whose files carry the same name."""
    _refuse_window(header)
    return _decoder(header, "llama", "LlamaForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": _has_bias(header, "attn_q"),
        "mlp_bias": _has_bias(header, "ffn_gate"),
        "rope_scaling": rope_scaling(header),
    }


def _qwen2(header: GgufHeader) -> JsonObject:
    _refuse_window(header)
    return _decoder(header, "qwen2", "Qwen2ForCausalLM") | {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_scaling": rope_scaling(header),
    }


def _qwen3(header: GgufHeader) -> JsonObject:
    _refuse_window(header)
    return _decoder(header, "qwen3", "Qwen3ForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": _has_bias(header, "attn_q"),
        "use_sliding_window": False,
        "rope_scaling": rope_scaling(header),
    }


def _gemma(header: GgufHeader) -> JsonObject:
    _refuse_window(header)
    return _decoder(header, "gemma", "GemmaForCausalLM") | _gemma_common(header)


def _gemma2(header: GgufHeader) -> JsonObject:
    window = header.integer("gemma2.attention.sliding_window", 4096)
    return (
        _decoder(header, "gemma2", "Gemma2ForCausalLM")
        | _gemma_common(header)
        | _windows(header, window, _GEMMA2_WINDOW_PERIOD)
        | {
            "query_pre_attn_scalar": _query_scalar(header, _GEMMA2_WIDE_BLOCKS),
            "attn_logit_softcapping": _soft_cap(header, "attn_logit_softcapping", 50.0),
            "final_logit_softcapping": _soft_cap(header, "final_logit_softcapping", 30.0),
        }
    )


def _gemma3(header: GgufHeader) -> JsonObject:
    """The text model. Its windowed layers have a rotary base of their own and are never scaled."""
    window = header.integer("gemma3.attention.sliding_window", 0)
    return (
        _decoder(header, "gemma3_text", "Gemma3ForCausalLM")
        | _gemma_common(header)
        | _windows(header, window, _GEMMA3_WINDOW_PERIOD)
        | {
            "query_pre_attn_scalar": _query_scalar(header, _GEMMA3_WIDE_BLOCKS),
            "rope_local_base_freq": header.number("gemma3.rope.freq_base_swa", 10000.0),
            "attn_logit_softcapping": _soft_cap(header, "attn_logit_softcapping", 0.0),
            "final_logit_softcapping": _soft_cap(header, "final_logit_softcapping", 0.0),
        }
    )


def _phi3(header: GgufHeader) -> JsonObject:
    head_dim, rotary_dim = _head_dim(header), _rotary_dim(header)
    context = header.integer("phi3.context_length")
    return _decoder(header, "phi3", "Phi3ForCausalLM") | {
        "hidden_act": "silu",
        "partial_rotary_factor": rotary_dim / head_dim,
        "original_max_position_embeddings": header.integer("phi3.rope.scaling.original_context_length", context),
        "rope_scaling": long_rope_scaling(header),
        # Zero says that there is no window.
        "sliding_window": header.integer("phi3.attention.sliding_window", 0) or None,
    }


def _decoder(header: GgufHeader, model_type: str, model_class: str) -> JsonObject:
    """The fields that decoder-only families share, under Hugging Face's names."""
    arch = header.architecture
    embedding = header.by_name.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(header.path, "tensor token_embd.weight is absent or has not two dimensions")
    num_heads = header.integer(f"{arch}.attention.head_count")
    head_dim = _head_dim(header)
    if (value_dim := header.integer(f"{arch}.attention.value_length", head_dim)) != head_dim:
        raise GgufError(header.path, f"{arch}.attention.value_length is {value_dim} and keys have {head_dim}")
    if (rotary_dim := _rotary_dim(header)) != head_dim and arch != "phi3":
        raise GgufError(
            header.path,
            f"{arch}.rope.dimension_count is {rotary_dim} and a head has {head_dim} dimensions; "
            "partial rotary embeddings are not supported",
        )
    return {
        "model_type": model_type,
        "architectures": [model_class],
        "hidden_size": header.integer(f"{arch}.embedding_length"),
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


def _gemma_common(header: GgufHeader) -> JsonObject:
    return {
        # Gemma has written both names; readers take one or the other.
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "attention_bias": _has_bias(header, "attn_q"),
        "rope_scaling": rope_scaling(header),
    }


def _windows(header: GgufHeader, window_tokens: int, default_period: int) -> JsonObject:
    """Which layers see a window alone: all but the last of each period, or as the file lists them."""
    num_layers = header.integer(f"{header.architecture}.block_count")
    field = f"{header.architecture}.attention.sliding_window_pattern"
    if isinstance(header.metadata.get(field), list):
        slides = header.flags(field)
        if len(slides) != num_layers:
            raise GgufError(header.path, f"{field} has {len(slides)} entries for {num_layers} blocks")
    else:
        period = header.integer(field, default_period)
        slides = [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
    if window_tokens <= 0:
        return {"sliding_window": None, "layer_types": [_FULL] * num_layers}
    return {"sliding_window": window_tokens, "layer_types": [_SLIDING if slide else _FULL for slide in slides]}


def _query_scalar(header: GgufHeader, wide_blocks: int) -> int:
    """What the attention scale is the inverse root of."""
    arch = header.architecture
    if header.integer(f"{arch}.block_count") != wide_blocks:
        return _head_dim(header)
    return header.integer(f"{arch}.embedding_length") // header.integer(f"{arch}.attention.head_count")


def _soft_cap(header: GgufHeader, field: str, default: float) -> float | None:
    """A cap on scores or logits; zero is none."""
    return header.number(f"{header.architecture}.{field}", default) or None


def _refuse_window(header: GgufHeader) -> None:
    """Families whose GGUF has no window: one that spans the context changes nothing."""
    field = f"{header.architecture}.attention.sliding_window"
    window = header.integer(field, 0)
    context = header.integer(f"{header.architecture}.context_length")
    if 0 < window < context:
        raise GgufError(
            header.path, f"{field} is {window} and the context {context} tokens; windows are not supported here"
        )


def _head_dim(header: GgufHeader) -> int:
    arch = header.architecture
    num_heads = header.integer(f"{arch}.attention.head_count")
    hidden_size = header.integer(f"{arch}.embedding_length")
    head_dim = header.integer(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1))
    if head_dim <= 0:
        raise GgufError(header.path, f"{num_heads} heads in {hidden_size} dimensions leave {head_dim} for each")
    return head_dim


def _rotary_dim(header: GgufHeader) -> int:
    return header.integer(f"{header.architecture}.rope.dimension_count", _head_dim(header))


def _has_bias(header: GgufHeader, stem: str) -> bool:
    return f"blk.0.{stem}.bias" in header.by_name


def _token_ids(header: GgufHeader) -> JsonObject:
    """An id the file does not have is null: left out, a reader would take its family's usual one."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {
        ours: header.integer(field) if (field := f"tokenizer.ggml.{theirs}") in header.metadata else None
        for ours, theirs in names.items()
    }


_ARCHITECTURES: Mapping[str, Callable[[GgufHeader], JsonObject]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
