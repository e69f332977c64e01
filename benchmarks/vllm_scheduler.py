"""Times vLLM's own Scheduler class in steady decode, as bench_scheduler does ours. Run by an interpreter that has vllm.

    python vllm_scheduler.py MODEL_DIRECTORY

Tested with vLLM 0.32. Prints one line of JSON: milliseconds of schedule + update by number of sequences.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import os
import statistics
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, NUM_STEPS = 16, 99


def scheduler(model: str, num_rows: int) -> Scheduler:
    num_blocks = num_rows * 70
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=8192, max_model_len=2048, is_encoder_decoder=False
        ),
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=2048),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    manager = StructuredOutputManager(config)
    return Scheduler(config, kv, structured_output_manager=manager, block_size=BLOCK)


def step(core: Scheduler) -> tuple[float, int]:
    begin = time.thread_time()
    planned = core.schedule()
    took = time.thread_time() - begin
    names = list(planned.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[5]] * len(names),
    )
    begin = time.thread_time()
    core.update_from_output(planned, output)
    return took + time.thread_time() - begin, planned.total_num_scheduled_tokens


def mean_step_ms(model: str, num_rows: int) -> float:
    core, hasher = scheduler(model, num_rows), get_request_block_hasher(BLOCK, sha256)
    for number in range(num_rows):
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        prompt = [(number * 131 + place * 7) % 40_000 for place in range(100 + number % 16)]
        core.add_request(Request(str(number), prompt, sampling, None, block_hasher=hasher))
    num_computed = 0
    while num_computed != num_rows or len(core.running) < num_rows:
        _, num_computed = step(core)
    runs = [[step(core)[0] for _ in range(NUM_STEPS)] for _ in range(3)]
    return round(min(statistics.mean(run) for run in runs) * 1e3, 4)


if __name__ == "__main__":
    init_none_hash(sha256)
    print(json.dumps({str(rows): mean_step_ms(sys.argv[1], rows) for rows in (32, 256, 1024)}))
