"""Checks that only `octavo doctor` makes: cores, instructions, shared memory, the cache, the tokenizer."""

from __future__ import annotations

from octavo.checks.types import Check, Facts, Finding, Severity
from octavo.sizes import format_bytes

_FAST_INSTRUCTIONS = (
    ("avx512_bf16", "AVX-512 with bf16"),
    ("avx512f", "AVX-512"),
    ("avx2", "AVX2"),
)
_LEAST_CPUS = 2
_LEAST_SHARED_BYTES = 2**30
_LEAST_CACHE_BYTES = 2**30


def cpu_instructions(facts: Facts) -> Finding | None:
    if facts.host is None or facts.machine.architecture not in ("x86_64", "AMD64"):
        return None
    limit = "AVX2 or better, for which there are fast kernels"
    for flag, name in _FAST_INSTRUCTIONS:
        if flag in facts.machine.cpu_flags:
            return Finding("cpu-instructions", Severity.OK, name, limit)
    return Finding(
        "cpu-instructions",
        Severity.WARNING,
        "no AVX2",
        limit,
        "The portable kernels serve, several times slower: use a CPU of 2013 or later, and in a virtual machine let "
        "it see the host's instructions (QEMU: -cpu host)",
    )


def cpu_count(facts: Facts) -> Finding | None:
    host, usable = facts.host, facts.machine.num_cpus
    if host is None:
        return None
    quota = "" if host.cpu_quota is None else f", a control group allows {host.cpu_quota:g}"
    measured = f"{usable} of {host.num_present_cpus} CPUs usable{quota}"
    limit = f"at least {_LEAST_CPUS}: router, scheduler and worker run at once"
    if usable >= _LEAST_CPUS:
        return Finding("cpu-count", Severity.OK, measured, limit)
    return Finding(
        "cpu-count",
        Severity.WARNING,
        measured,
        limit,
        "Raise the container's CPU limit (--cpus, resources.limits.cpu), or the process's affinity (taskset)",
    )


def shared_memory(facts: Facts) -> Finding | None:
    """Of interest where ranks on this machine exchange tensors through it, as NCCL does."""
    if facts.host is None or facts.host.shared_memory is None:
        return None
    shared = facts.host.shared_memory
    num_ranks = 1 if facts.model is None else facts.model.num_local_ranks
    needed = _LEAST_SHARED_BYTES if num_ranks > 1 else 0
    measured = f"{shared.path}: {format_bytes(shared.free_bytes)} free"
    limit = f"{format_bytes(needed)} for {num_ranks} ranks" if needed else "needed by several ranks only"
    if shared.is_writable and shared.free_bytes >= needed:
        return Finding("shared-memory", Severity.OK, measured, limit)
    if not shared.is_writable:
        measured += ", and it cannot be written"
    remedy = "Give the container more: docker run --shm-size 2g, or an emptyDir of medium Memory at /dev/shm"
    return Finding(
        "shared-memory", Severity.WARNING if needed else Severity.OK, measured, limit, remedy if needed else ""
    )


def cache_directory(facts: Facts) -> Finding | None:
    if facts.host is None:
        return None
    cache = facts.host.cache
    measured = f"{cache.path}: {format_bytes(cache.free_bytes)} free"
    limit = f"writable, with {format_bytes(_LEAST_CACHE_BYTES)} free, for downloads and conversions"
    if cache.is_writable and cache.free_bytes >= _LEAST_CACHE_BYTES:
        return Finding("cache-directory", Severity.OK, measured, limit)
    if not cache.is_writable:
        measured += ", and it cannot be written"
    return Finding(
        "cache-directory",
        Severity.WARNING,
        measured,
        limit,
        "Set OCTAVO_CACHE to a directory that can be written and has room; a directory of safetensors needs none",
    )


def tokenizer_fits(facts: Facts) -> Finding | None:
    if facts.model is None or facts.model.tokenizer is None:
        return None
    tokenizer = facts.model.tokenizer
    limit = "every token id has a row of the embedding"
    if tokenizer.problem is not None:
        remedy = f"Mend tokenizer.json in {facts.model.directory}, or take the model's own"
        return Finding("tokenizer", Severity.FAILURE, tokenizer.problem, limit, remedy)
    measured = (
        f"{tokenizer.num_tokens} tokens, the highest id {tokenizer.highest_token_id}; {tokenizer.num_rows} rows "
        "(vocab_size)"
    )
    if tokenizer.highest_token_id < tokenizer.num_rows:
        return Finding("tokenizer", Severity.OK, measured, limit)
    remedy = "The tokenizer does not belong to these weights: use the model's own"
    return Finding("tokenizer", Severity.FAILURE, measured, limit, remedy)


CHECKS = (
    Check(
        "cpu-instructions",
        "The CPU has instructions that there are fast kernels for",
        "Looked at by `octavo doctor` alone. Without AVX2 the portable kernels serve: the same answers, several times "
        "slower. Virtual machines often hide what the host has: QEMU shows it with `-cpu host`.",
        cpu_instructions,
        processes=("worker",),
    ),
    Check(
        "cpu-count",
        "There is more than one CPU to use",
        "Looked at by `octavo doctor` alone. What counts is the affinity cut to the control groups' quota: raise "
        "`--cpus` of Docker or `resources.limits.cpu` of Kubernetes.",
        cpu_count,
    ),
    Check(
        "shared-memory",
        "There is shared memory for several ranks",
        "Looked at by `octavo doctor` alone. Containers get 64 MiB of /dev/shm unless told otherwise: "
        "`docker run --shm-size 2g`, or in Kubernetes an `emptyDir` of medium `Memory` mounted there.",
        shared_memory,
        processes=("worker",),
    ),
    Check(
        "cache-directory",
        "The cache can be written and has room",
        "Looked at by `octavo doctor` alone. Downloads and conversions of .gguf files go to `$OCTAVO_CACHE`, else "
        "`~/.cache/octavo`. Nothing in it is ever evicted: delete what is not needed while no model starts.",
        cache_directory,
        processes=("router", "worker"),
    ),
    Check(
        "tokenizer",
        "The tokenizer belongs to the weights",
        "Looked at by `octavo doctor`; a worker refuses such a model by itself. A tokenizer with ids beyond the "
        "embedding is another model's, or tokens were added and the embedding was not resized.",
        tokenizer_fits,
        processes=("worker",),
    ),
)
