"""A Llama of two small layers with random weights and a byte-level tokenizer, made in code: what `doctor --run` serves.

Needs the tokenizers package; weights are written as safetensors by hand, so that no tensor library is.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from random import Random

HIDDEN, _WIDTH, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 96, 2, 4, 2, 16
_END_TOKEN = "<|end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint into an existing directory, which is returned; the same bytes for the same seed."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = [_END_TOKEN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: token_id for token_id, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END_TOKEN, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": _END_TOKEN, "chat_template": _CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(_config(len(names))), encoding="utf-8")
    _write_weights(directory / "model.safetensors", len(names), seed)
    return directory


def _config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": _WIDTH,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def _tensors(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """(name, shape, standard deviation) of each; norms lie around 1, everything else around 0."""
    yield "model.embed_tokens.weight", (vocab_size, HIDDEN), 1.0
    yield "lm_head.weight", (vocab_size, HIDDEN), 0.3
    yield "model.norm.weight", (HIDDEN,), 0.1
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,), 0.1
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,), 0.1
        yield f"{prefix}.self_attn.q_proj.weight", (_HEADS * _HEAD_DIM, HIDDEN), HIDDEN**-0.5
        yield f"{prefix}.self_attn.k_proj.weight", (_KV_HEADS * _HEAD_DIM, HIDDEN), HIDDEN**-0.5
        yield f"{prefix}.self_attn.v_proj.weight", (_KV_HEADS * _HEAD_DIM, HIDDEN), HIDDEN**-0.5
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, _HEADS * _HEAD_DIM), HIDDEN**-0.5
        yield f"{prefix}.mlp.gate_proj.weight", (_WIDTH, HIDDEN), HIDDEN**-0.5
        yield f"{prefix}.mlp.up_proj.weight", (_WIDTH, HIDDEN), HIDDEN**-0.5
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, _WIDTH), _WIDTH**-0.5


def _write_weights(path: Path, vocab_size: int, seed: int) -> None:
    """The safetensors format: the header's length (8 bytes), the header as JSON, the tensors one after the other."""
    random, header, values = Random(seed), dict[str, object](), array("f")
    for name, shape, deviation in _tensors(vocab_size):
        begin = 4 * len(values)
        mean, count = (1.0 if len(shape) == 1 else 0.0), shape[0] * (shape[1] if len(shape) > 1 else 1)
        values.extend(random.gauss(mean, deviation) for _ in range(count))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, 4 * len(values)]}
    if sys.byteorder == "big":
        values.byteswap()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + values.tobytes())
