"""How GGUF names and lays out tensors, and what Hugging Face calls them.

One table row per architecture. It knows names, row orders and offsets only, and reads nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Two norms in a block: one before attention, one before the MLP.
_NORM_BEFORE = {"ffn_norm": "post_attention_layernorm"}
# Four norms in a block: before and after attention, before and after the MLP.
_NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Fused: queries, keys and values in one matrix; the gate's rows before the up projection's.
_PHI3 = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary tables: their content is in the configuration.
_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_DERIVED_ENDINGS = (".attn_rot_embd.weight", ".rope_freqs.weight")


@dataclass(frozen=True)
class GgufLayout:
    """One architecture's layout.

    `block` names the tensors of a block: GGUF's stem to Hugging Face's. `interleaves_rotary_pairs`: the
    rows of q and k are stored with the two halves of each head interleaved, as ggml's own rotary embedding
    for this architecture wants them. `norm_offset` is what the file adds to the weights of norms: a Gemma
    norm multiplies by one plus its weight, and the file stores the factor.
    """

    block: Mapping[str, str]
    interleaves_rotary_pairs: bool = False
    norm_offset: float = 0.0

    def huggingface_name(self, gguf_name: str) -> str | None:
        """The tensor's name in a Hugging Face checkpoint; None for one that has none."""
        stem, _, kind = gguf_name.rpartition(".")
        if stem in _OUTER:
            return f"{_OUTER[stem]}.{kind}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in self.block:
            return f"model.layers.{parts[1]}.{self.block[parts[2]]}.{kind}"
        return None

    def offset_of(self, gguf_name: str) -> float:
        """What to take from a tensor's stored values."""
        return self.norm_offset if gguf_name.endswith("norm.weight") else 0.0


_LLAMA_BLOCK = _ATTENTION | _NORM_BEFORE | _MLP

LAYOUTS: Mapping[str, GgufLayout] = {
    "llama": GgufLayout(_LLAMA_BLOCK, interleaves_rotary_pairs=True),
    "qwen2": GgufLayout(_LLAMA_BLOCK),
    "qwen3": GgufLayout(_LLAMA_BLOCK | _HEAD_NORMS),
    "gemma": GgufLayout(_LLAMA_BLOCK, norm_offset=1.0),
    "gemma2": GgufLayout(_ATTENTION | _NORMS_AROUND | _MLP, norm_offset=1.0),
    "gemma3": GgufLayout(_ATTENTION | _HEAD_NORMS | _NORMS_AROUND | _MLP, norm_offset=1.0),
    "phi3": GgufLayout(_PHI3),
}


def is_derived(gguf_name: str) -> bool:
    """Whether a tensor repeats what the configuration says, so that no model parameter takes it."""
    return gguf_name in _DERIVED or gguf_name.endswith(_DERIVED_ENDINGS)


def deinterleaved_rows(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """Which stored row becomes each row of the Hugging Face tensor, where rotary pairs are interleaved.

    A head of size d keeps row i of half h at 2 * i + h: [num_heads, d / 2, 2] in the file,
    [num_heads, 2, d / 2] here. `num_heads` counts this tensor's heads, `num_rows` is a multiple of twice it.
    """
    rows = np.arange(num_rows, dtype=np.intp)
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)
