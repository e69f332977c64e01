"""Checks of the model asked for: found, whole, in a precision the CPU has, within its context. Pure functions."""

from __future__ import annotations

from octavo.checks.types import Check, Facts, Finding, Severity
from octavo.precision import BF16_INSTRUCTIONS

_SHOWN_PROBLEMS = 5


def model_found(facts: Facts) -> Finding | None:
    if facts.model is None:
        return None
    limit = "MODEL must lead to files"
    if facts.model.missing is None:
        return Finding("model-found", Severity.OK, facts.model.directory or facts.model.name, limit)
    remedy = "Check the spelling and the path of MODEL"
    return Finding("model-found", Severity.FAILURE, facts.model.missing, limit, remedy)


def model_files(facts: Facts) -> Finding | None:
    if facts.model is None or facts.model.missing is not None:
        return None
    problems = facts.model.file_problems
    if not problems:
        return Finding("model-files", Severity.OK, "whole", "every file must be whole, of a model that can be served")
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    more = len(problems) - _SHOWN_PROBLEMS
    return Finding(
        "model-files",
        Severity.FAILURE,
        shown + (f"; and {more} more" if more > 0 else ""),
        "every file must be whole, of a model that can be served",
        f"Mend or replace what is named in {facts.model.directory}",
    )


def cpu_precision(facts: Facts) -> Finding | None:
    if facts.model is None or facts.model.dtype is None:
        return None
    if facts.cards is not None and facts.cards.on_gpu:
        return None
    dtype = facts.model.dtype
    limit = "a precision the CPU computes in"
    if dtype == "float32" or (dtype == "bfloat16" and facts.machine.cpu_flags & BF16_INSTRUCTIONS):
        return Finding("cpu-precision", Severity.OK, dtype, limit)
    lacking = "bf16" if dtype == "bfloat16" else "fp16 matrix"
    return Finding(
        "cpu-precision",
        Severity.WARNING,
        f"{dtype}, and this CPU has no {lacking} instructions",
        limit,
        "Use --dtype float32 if there is memory for it; it is likely to be faster here",
    )


def context_length(facts: Facts) -> Finding | None:
    model = facts.model
    if model is None or model.model_limit_tokens is None or model.max_model_len_tokens is None:
        return None
    asked, limit = model.max_model_len_tokens, model.model_limit_tokens
    ok = asked <= limit
    return Finding(
        "context-length",
        Severity.OK if ok else Severity.FAILURE,
        f"--max-model-len {asked}",
        f"the model was made for {limit} tokens",
        "" if ok else f"Use --max-model-len {limit} or less",
    )


CHECKS = (
    Check(
        "model-found",
        "The model exists",
        "MODEL is a directory with config.json and safetensors files, a .gguf file, or a name. A name is looked "
        "up where the finding says; a path is taken relative to the current directory.",
        model_found,
        processes=("router", "worker"),
    ),
    Check(
        "model-files",
        "The model's files are whole",
        "A truncated file, a Git LFS pointer or an absent shard is named with the bytes expected and found: fetch "
        "it again. For Git LFS run `git lfs pull` in the model's directory.",
        model_files,
        processes=("router", "worker"),
    ),
    Check(
        "cpu-precision",
        "The CPU computes in the model's precision",
        "Only a warning: a CPU without bf16 or fp16 instructions converts on the way and is slower. "
        "`--dtype float32` needs up to twice the memory and is likely to be faster there.",
        cpu_precision,
        processes=("worker",),
    ),
    Check(
        "context-length",
        "--max-model-len is within the model's own limit",
        "Lower `--max-model-len`, or leave it out to use the model's limit.",
        context_length,
        processes=("worker",),
    ),
)
