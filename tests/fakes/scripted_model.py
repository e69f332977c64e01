"""The parrot: a tiny Llama checkpoint that answers with a script, so that tests of text need no luck.

Attention and MLP add nothing (o_proj and down_proj are zero), norms are one, the head is not tied. Each scripted token
t_k has an embedding dimension of its own, from which the head reads the next token: a prompt whose last token is the
trigger is continued with exactly the script under greedy decoding, whatever stood before it. Real processes serve it
like any other model:  python -m tests.fakes.scripted_model DIRECTORY PIECE...
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.tiny_tokenizers import END_TOKEN, Style, piece_token, tiny_tokenizer

_HEAD_DIM = 32
_LOGIT = 10.0


@dataclass(frozen=True)
class Script:
    """What the model says after `trigger`, one token a piece; bytes need not be whole characters.

    Pieces and trigger are all different. A piece may be the name of a special token. Unless `ends` is false the end
    token follows the last piece; after a script that does not end, the model starts over.
    """

    pieces: Sequence[str | bytes]
    trigger: str = ":"
    ends: bool = True
    style: Style = "byte_level"
    specials: Sequence[str] = ()
    max_positions: int = 2048
    # Fields that replace or join those of config.json, generation_config.json (None: no such file) and
    # tokenizer_config.json.
    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScriptedModel:
    """A written model: where it is, and the ids of its script, the trigger's not included, the end token's included."""

    directory: Path
    script_ids: tuple[int, ...]
    trigger_id: int
    end_id: int


def write_scripted_model(directory: Path, script: Script) -> ScriptedModel:
    """Writes the checkpoint. Raises ValueError for a script that no greedy model can follow: a token in it twice."""
    plain = [piece for piece in script.pieces if piece not in script.specials]
    tokenizer = tiny_tokenizer(plain, script.style, script.specials)
    trigger_id = _trigger_id(tokenizer, script)
    end_id = _token_id(tokenizer, END_TOKEN)
    script_ids = [_piece_id(tokenizer, piece, script) for piece in script.pieces] + [end_id] * script.ends
    chain = [trigger_id, *script_ids]
    if len(set(chain)) != len(chain):
        raise ValueError(f"token ids {chain}: the trigger and every piece of a script must be different tokens")
    config = _config(tokenizer.get_vocab_size(), len(chain), script)
    files = ModelFiles(
        config={**config, **script.config},
        tensors=_tensors(config, chain, loops=not script.ends),
        tokenizer=tokenizer,
        tokenizer_config={"eos_token": END_TOKEN, **script.tokenizer_config},
        generation_config=script.generation_config,
    )
    return ScriptedModel(write_model(directory, files), tuple(script_ids), trigger_id, end_id)


def _trigger_id(tokenizer: Tokenizer, script: Script) -> int:
    ids = tokenizer.encode(script.trigger, add_special_tokens=False).ids
    token_id: int = ids[-1]
    return token_id


def _piece_id(tokenizer: Tokenizer, piece: str | bytes, script: Script) -> int:
    return _token_id(tokenizer, piece if piece in script.specials else piece_token(piece, script.style))


def _token_id(tokenizer: Tokenizer, name: str | bytes) -> int:
    token_id = tokenizer.token_to_id(str(name))
    if token_id is None:
        raise ValueError(f"{name!r} is not a token")
    return token_id


def _config(vocab_size: int, num_scripted: int, script: Script) -> dict[str, Any]:
    num_heads = max(2, -(-num_scripted // _HEAD_DIM))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": num_heads * _HEAD_DIM,
        "intermediate_size": 32,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": script.max_positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }


def _tensors(config: Mapping[str, Any], chain: Sequence[int], loops: bool) -> dict[str, torch.Tensor]:
    hidden, width, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    embedding, head = torch.zeros(rows, hidden), torch.zeros(rows, hidden)
    followers = [*chain[1:], chain[1]] if loops else chain[1:]
    for dimension, token_id in enumerate(chain):
        embedding[token_id, dimension] = 1.0
    for dimension, token_id in enumerate(followers):
        head[token_id, dimension] = _LOGIT
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(hidden, hidden),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(_HEAD_DIM, hidden),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(_HEAD_DIM, hidden),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(hidden, hidden),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(width, hidden),
        f"{layer}.mlp.up_proj.weight": torch.zeros(width, hidden),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, width),
    }


if __name__ == "__main__":
    written = write_scripted_model(Path(sys.argv[1]), Script(sys.argv[2:]))
    print(f"{written.directory}: a prompt that ends with ':' is continued with {sys.argv[2:]}")
