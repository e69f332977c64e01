"""The worker's options, each with its default and a sentence; values found at run time live elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernels.partition import KV_PARTITION
from octavo.common_options import InternalTlsOptions, ObservedOptions, ScrapedOptions
from octavo.cost_model import parse_costs
from octavo.options import DEFAULT_MODEL, Limits, OptionError, argument, check_values, option
from octavo.sharding import MAX_RANKS

_AT_LEAST_ONE = Limits(minimum=1)


@dataclass(frozen=True)
class WorkerConfig(ObservedOptions, InternalTlsOptions, ScrapedOptions):
    """One worker process: which model it holds, in which precision, with how much room for KV blocks.

    The pool of KV blocks has one size, from the first of these that is given: `num_kv_blocks`,
    `kv_cache_memory`, and else `kv_memory_fraction` of the memory left free by the weights, but no more than
    `octavo.memory.default_kv_bytes` finds useful.
    """

    model: str = argument(DEFAULT_MODEL, "Model to serve: a directory, a .gguf file or a hub name.")
    served_model_name: str | None = option(
        None, "Name clients call the model by; the last part of the model's path when left out."
    )
    scheduler_address: str = option("127.0.0.1:8002", "host:port of the scheduler to attach to, or unix:PATH.")
    dtype: str = option(
        "auto",
        "Precision of weights and activations; auto follows the checkpoint.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache: auto is --dtype's; fp8_e4m3 holds twice as many tokens as 16 bits, under the "
        "checkpoint's scales where it has them. Not for the cpu kernels.",
        choices=("auto", "fp8_e4m3"),
    )
    device: str = option(
        "auto",
        "Where to compute: cpu, cuda, or cuda:N for the first of the ranks' cards. auto takes the GPU, and the CPU "
        "only where nothing says that there is one.",
    )
    max_model_len: int | None = option(
        None,
        "Longest sequence, prompt and output together; the model's own limit when unset.",
        limits=_AT_LEAST_ONE,
    )
    block_size: int = option(16, "Tokens in a KV block.", limits=Limits(1, 256))
    num_kv_blocks: int | None = option(None, "Number of KV blocks.", limits=_AT_LEAST_ONE)
    kv_cache_memory: int | None = option(None, "Size of the KV cache.", kind="bytes", limits=Limits(minimum=2**16))
    kv_memory_fraction: float = option(
        0.5,
        "Share of the memory left free by the weights that the KV cache may take where neither "
        "--num-kv-blocks nor --kv-cache-memory is given; it takes no more than --max-num-seqs sequences can use.",
        limits=Limits(0.01, 0.95),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of a card's memory that the worker may hold, weights, workspace and graphs included; what other "
        "processes hold is left to them.",
        limits=Limits(0.05, 0.99),
    )
    max_num_seqs: int = option(64, "Most sequences that run at once.", limits=Limits(1, 4096))
    max_num_batched_tokens: int = option(
        512, "Most tokens computed in one step, prefill and decode together.", limits=Limits(1, 65536)
    )
    swap_space: float = option(
        0.0,
        "Host memory in GiB to which KV blocks are copied that the cache evicts, and from which they are copied back.",
        limits=Limits(0, 2**20),
    )
    kernels: str = option(
        "auto",
        "Kernels to compute with; auto takes the fastest that this machine runs.",
        choices=("auto", "reference", "cpu", "triton"),
    )
    enforce_eager: bool = option(
        False, "Launch every kernel of a decode step by itself: no CUDA graphs, which saves their memory and start."
    )
    batch_invariant: bool = option(
        False,
        "On a GPU: fix the order of every sum, so that an answer does not depend on what else runs. Matrix products "
        "and prefill are slower. On a CPU it is always so.",
    )
    nvtx: bool = option(False, "On a GPU: name steps and their phases for profilers such as Nsight Systems.")
    num_threads: int | None = option(
        None,
        "Threads of one step, of each rank; when unset one a core that the process may use, ranks sharing them, and "
        "fewer while others take a core.",
        limits=_AT_LEAST_ONE,
    )
    tensor_parallel_size: int = option(
        1,
        "Ranks that hold the model together, each a process with a part of every layer. The worker starts them, or "
        "joins those that a launcher such as torchrun has started; sizes of memory are those of each rank.",
        limits=Limits(1, MAX_RANKS),
    )
    rendezvous_timeout: float = option(
        120.0,
        "Longest that the ranks of a replica wait for each other to arrive.",
        kind="seconds",
        limits=Limits(minimum=1),
    )
    simulate: bool = option(False, "Compute nothing: take as long as --simulated-costs says, and make the text up.")
    simulated_costs: str = option(
        "",
        "What a simulated step costs, as name=number,...; see `octavo plan --help` for the names and defaults. "
        "output_tokens is the mean length of its answers, 256 when not given.",
    )

    def __post_init__(self) -> None:
        check_values(self)
        self.check_internal_tls()
        if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is None:
            raise OptionError("--device", self.device, "must be auto, cpu, cuda or cuda:N", "Use cuda:0 for the first")
        if self.device == "cpu" and self.kernels == "triton":
            raise OptionError("--kernels", self.kernels, "runs on GPUs, and --device is cpu", "Leave one of them out")
        if KV_PARTITION % self.block_size and not self.simulate:
            raise OptionError(
                "--block-size", self.block_size, f"does not divide {KV_PARTITION}", "Use 16, or 8, 32, 64, 128 or 256"
            )
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise OptionError(
                "--num-kv-blocks",
                self.num_kv_blocks,
                "says the size of the KV cache, and so does --kv-cache-memory",
                "Give one of the two",
            )
        try:
            parse_costs(self.simulated_costs)
        except ValueError as error:
            raise OptionError(
                "--simulated-costs", self.simulated_costs, str(error), "Use prefill_tokens_per_s=5000,step_ms=20"
            ) from None
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise OptionError(
                "--max-num-seqs",
                self.max_num_seqs,
                f"is more than --max-num-batched-tokens {self.max_num_batched_tokens}, and each running "
                "sequence takes a token of every step",
                f"Use at most {self.max_num_batched_tokens}, or raise --max-num-batched-tokens",
            )

    @property
    def swap_bytes(self) -> int:
        """The size of the host tier in bytes."""
        return int(self.swap_space * 2**30)

    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """Fields whose value changes nothing because another decides, each with the reason."""
        if self.simulate:
            reason = "--simulate computes nothing"
            unused = ("dtype", "kernels", "num_threads", "kv_memory_fraction", "tensor_parallel_size")
            return tuple((name, reason) for name in unused)
        if self.simulated_costs:
            return (("simulated_costs", "--simulate is not given"), *self._overruled_sizes())
        if self.device == "cpu":
            gpu_only = ("gpu_memory_utilization", "enforce_eager", "nvtx")
            return (*((name, "--device is cpu") for name in gpu_only), *self._overruled_sizes())
        return self._overruled_sizes()

    def _overruled_sizes(self) -> tuple[tuple[str, str], ...]:
        if self.num_kv_blocks is not None:
            return (("kv_memory_fraction", "--num-kv-blocks fixes the size of the KV cache"),)
        if self.kv_cache_memory is not None:
            return (("kv_memory_fraction", "--kv-cache-memory fixes the size of the KV cache"),)
        return ()
