"""What every part of the device check is given: where it runs, at which sizes, until when, and where figures go.

Knows clocks and devices; must not know what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernels.api import Backend
from tools.graph_time import graph_time_ms
from worker_svc.device.api import Device

# Bytes between two uses of the same tensors: several times any second-level cache.
COLD_BYTES = 250e6


@dataclass(frozen=True)
class Sizes:
    """Shapes that are measured. Decode is (rows, context); prefill (new tokens, context before), of one row."""

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    context: int
    num_steps: int
    copy_bytes: int
    matrix: int
    # Config of the model with random weights, as in config.json.
    model: dict[str, Any]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    # Whatever the memory holds serves where no figure is looked at.
    has_random_weights: bool = True


_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

FULL = Sizes(
    decode=(
        *((1, 1024), (1, 4096), (1, 32768)),
        *((16, 1024), (16, 4096), (16, 32768)),
        *((64, 1024), (64, 4096), (64, 32768)),
        *((256, 1024), (256, 4096)),
    ),
    prefill=((4096, 0), (16384, 0), (2048, 14336)),
    batches=(1, 16, 64, 256),
    context=1024,
    num_steps=40,
    copy_bytes=4 << 30,
    matrix=8192,
    model=_LLAMA_8B,
)

TOY = Sizes(
    decode=((1, 40), (3, 300)),
    prefill=((24, 0), (8, 32)),
    batches=(1, 3),
    context=32,
    num_steps=6,
    copy_bytes=1 << 16,
    matrix=32,
    model={
        **_LLAMA_8B,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 512,
    },
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


# Everything that FULL launches, with as little beside as will do.
COMPILED = replace(
    FULL,
    decode=((1, 1024), (16, 256), (64, 64), (256, 64)),
    prefill=((256, 0), (64, 448)),
    context=64,
    num_steps=3,
    model={**_LLAMA_8B, "num_hidden_layers": 1},
    has_random_weights=False,
)


@dataclass
class Bench:
    """One run. `figures` gathers what goes to the JSON file; `invariant` are the kernels in batch-invariant mode."""

    device: Device
    backend: Backend
    invariant: Backend
    sizes: Sizes
    ends_at_s: float
    say: Callable[[str], None]
    figures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> torch.device:
        return self.device.torch_device

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether so much of the budget is left; says what is left out where it is not."""
        if time.monotonic() + seconds < self.ends_at_s:
            return True
        self.say(f"left out for want of time: {what}")
        self.figures.append({"kind": "left out", "what": what})
        return False

    def note(self, kind: str, line: str, **values: Any) -> None:
        """One figure, for the file and for whoever looks on."""
        self.figures.append({"kind": kind, **values})
        self.say(line)

    def time_us(self, calls: Sequence[Callable[[], object]]) -> float:
        """Microseconds of one of the calls, which run in turn; on a GPU inside a CUDA graph. The median of five."""
        if self.place.type == "cuda":
            return 1e3 * graph_time_ms(calls)
        for call in calls:
            call()
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            for call in calls:
                call()
            times.append((time.perf_counter() - begun) / len(calls))
        return 1e6 * sorted(times)[2]

    def copies(self, num_bytes: float) -> int:
        """How many sets of so many bytes to use in turn, for none to be found in a cache."""
        if self.place.type != "cuda":
            return 2
        return max(1, min(24, math.ceil(COLD_BYTES / num_bytes)))

    def free_bytes(self) -> float:
        """Memory of the device that can be had."""
        if self.place.type != "cuda":
            return math.inf
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self.place)[0])
