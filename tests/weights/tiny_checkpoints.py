"""Tiny Llama checkpoints with grouped-query attention, as safetensors and as GGUF of any type."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from worker_svc.weights import Checkpoint, ExpectedTensor, Weights

NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 2, 64, 4, 2, 16, 96, 48


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model with a head of its own."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}mlp.gate_proj.weight": (MLP, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (MLP, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, MLP),
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def random_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 weights whose values float16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).half().float() for name, shape in shapes().items()}


def load_all(
    checkpoint: Checkpoint, dtype: torch.dtype, expected: dict[str, ExpectedTensor] | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor that is expected, by default the tiny model's."""
    if expected is None:
        expected = {name: ExpectedTensor(shape) for name, shape in shapes().items()}
    weights = Weights(expected, checkpoint, dtype)
    return {name: weights.take(name) for name in expected}


def write_sharded(directory: Path, weights: dict[str, torch.Tensor], num_shards: int = 2) -> dict[str, str]:
    """Deal the tensors over shards in turn and write an index. Returns its weight_map."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{shard + 1:05}-of-{num_shards:05}.safetensors" for shard in range(num_shards)]
    weight_map = {tensor: names[place % num_shards] for place, tensor in enumerate(weights)}
    for name in names:
        save_file({tensor: weights[tensor] for tensor in weights if weight_map[tensor] == name}, directory / name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_gguf(
    path: Path, weights: dict[str, torch.Tensor], matrix_type: gguf.GGMLQuantizationType, arch: str = "llama"
) -> None:
    """Write the weights as llama.cpp's converter does: vectors in float32, q and k rows permuted for llama.

    The permutation is its own, row by row, so that a test compares two independent ways.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        values = tensor.numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = interleave(values, NUM_HEADS if stem.endswith("q_proj") else NUM_KV_HEADS)
        tensor_type = matrix_type if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        gguf_name = f"{names.get_name(stem) or stem}.{kind}"
        writer.add_tensor(gguf_name, gguf.quantize(values, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Stored row 2 * i + h of a head is row i of its half h."""
    stored = np.empty_like(values)
    head_dim = len(values) // num_heads
    for row in range(len(values)):
        head, within = divmod(row, head_dim)
        half, index = divmod(within, head_dim // 2)
        stored[head * head_dim + 2 * index + half] = values[row]
    return stored
