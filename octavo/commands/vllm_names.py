"""Options that users know from vLLM, answered with ours: a table, and the sentence it makes. Knows no parser."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_YET = "is not supported yet"

RENAMED: Mapping[str, str] = {
    "--port": "is called --http-port here; gRPC has its own, --grpc-port",
    "--model": "is the argument MODEL here: octavo serve MODEL",
    "--ssl-keyfile": "is called --tls-key here; gRPC and HTTP share it",
    "--ssl-certfile": "is called --tls-cert here; gRPC and HTTP share it",
    "--ssl-ca-certs": "is called --tls-client-ca here; gRPC and HTTP share it",
    "--uvicorn-log-level": "is called --log-level here",
    "--kv-cache-memory-bytes": "is called --kv-cache-memory here, and takes a size such as 2GiB",
    "--num-gpu-blocks-override": "is called --num-kv-blocks here",
    "--cpu-offload-gb": "does not exist: weights stay where the worker computes",
    "--compilation-config": "does not exist: nothing is compiled; --enforce-eager turns CUDA graphs off",
    "--max-seq-len-to-capture": "does not exist: a graph of decode steps holds for any length",
    "--cuda-graph-sizes": "does not exist: --max-num-seqs says which graphs there are; --enforce-eager turns them off",
    "--enable-chunked-prefill": "needs no option: prompts are always computed in chunks, sized by "
    "--max-num-batched-tokens",
    "--async-scheduling": "needs no option: the next step is always planned while one runs",
    "--max-num-partial-prefills": "does not exist: --max-num-batched-tokens and --max-prefill-tokens limit a step",
    "--long-prefill-token-threshold": "is called --max-prefill-tokens here",
    "--max-log-len": "does not exist: prompts are never logged",
    "--enable-log-requests": "does not exist: prompts are never logged",
    "--disable-log-requests": "needs no option: prompts are never logged",
    "--disable-log-stats": "is --stats-interval 0 here",
    "--otlp-traces-endpoint": "is called --otlp-endpoint here",
    "--collect-detailed-traces": "does not exist: traces have a span for each part of a request",
    "--attention-backend": "is called --kernels here",
    "--load-format": "does not exist: safetensors and GGUF are told apart by the files",
    "--tokenizer": "does not exist: the tokenizer is the one beside the weights",
    "--tokenizer-mode": "does not exist: the tokenizer is the one beside the weights",
    "--skip-tokenizer-init": "does not exist: the router always needs the tokenizer",
    "--trust-remote-code": "does not exist: no code of a model is ever run",
    "--download-dir": "does not exist: set HF_HOME to move the hub's cache",
    "--model-impl": "does not exist: the Llama family is the one implementation",
    "--runner": "does not exist: models generate",
    "--task": "does not exist: models generate",
    "--pipeline-parallel-size": f"{_NOT_YET}: use --tensor-parallel-size",
    "--distributed-executor-backend": "does not exist: ranks are processes of their own, started by the worker or by a "
    "launcher such as torchrun",
    "--quantization": "needs no option: config.json says how weights are quantized",
    "--enable-lora": _NOT_YET,
    "--speculative-config": _NOT_YET,
    "--chat-template": f"{_NOT_YET}: the template beside the tokenizer is used",
    "--generation-config": f"{_NOT_YET}: the model's own generation_config.json is used",
    "--enable-auto-tool-choice": "needs no option: tools are called wherever the chat template knows them",
    "--revision": f"{_NOT_YET}: name a directory of that revision",
    "--limit-mm-per-prompt": "does not exist: models take text alone",
}
"""A name of vLLM's, and how the sentence about it goes on."""

SHORT_NAMES: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
}


def answer(flag: str) -> str | None:
    """What to use in place of a vLLM option, as a sentence; None for a name that is not vLLM's.

    Underscores read as dashes and `--no-` is looked through, as vLLM does both.
    """
    spelled = SHORT_NAMES.get(flag, flag).replace("_", "-")
    for name in (spelled, spelled.replace("--no-", "--", 1)):
        if name in RENAMED:
            return f"{flag} {RENAMED[name]}"
    return f"{flag} is spelled {spelled} here" if flag in SHORT_NAMES else None
