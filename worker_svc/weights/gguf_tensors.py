"""How GGUF names and lays out tensors, and what Hugging Face calls them.

One table row per architecture. It knows names and row orders only, and reads nothing.
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
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Rotary tables: their content is in the configuration.
_DERIVED = ("rope_freqs.weight",)
_DERIVED_ENDINGS = (".attn_rot_embd.weight", ".rope_freqs.weight")


@dataclass(frozen=True)
class GgufLayout:
    """One architecture's layout.

    `interleaves_rotary_pairs`: the rows of q and k are stored with the two halves of each head
    interleaved, as ggml's own rotary embedding for this architecture wants them.
    """

    interleaves_rotary_pairs: bool


LAYOUTS: Mapping[str, GgufLayout] = {
    "llama": GgufLayout(interleaves_rotary_pairs=True),
    "qwen2": GgufLayout(interleaves_rotary_pairs=False),
}


def is_derived(gguf_name: str) -> bool:
    """Whether a tensor repeats what the configuration says, so that no model parameter takes it."""
    return gguf_name in _DERIVED or gguf_name.endswith(_DERIVED_ENDINGS)


def huggingface_name(gguf_name: str) -> str | None:
    """The tensor's name in a Hugging Face checkpoint; None for one that has none."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{kind}"
    return None


def deinterleaved_rows(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """Which stored row becomes each row of the Hugging Face tensor, where rotary pairs are interleaved.

    A head of size d keeps row i of half h at 2 * i + h: [num_heads, d / 2, 2] in the file,
    [num_heads, 2, d / 2] here. `num_heads` counts this tensor's heads, `num_rows` is a multiple of twice it.
    """
    rows = np.arange(num_rows, dtype=np.intp)
    return rows.reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)
