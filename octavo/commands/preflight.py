"""Runs the checks before a start: collects what the options ask for, then judges it.

Knows which options mean which facts; the judging is octavo.checks'.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.addresses import UNIX_PREFIX
from octavo.checks import collect
from octavo.checks.registry import checks_for, failures, run_checks, warnings
from octavo.checks.types import Facts, Finding, ModelFacts
from octavo.process import StartError
from router.config import RouterConfig
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig
from worker_svc.parallel.place import launched_place

_LOG = logging.getLogger(__name__)


def check_service(name: str, config: Any) -> None:
    """Check what one process, a router, scheduler or worker, needs. Raises StartError with the first failure."""
    ports: list[collect.PortRequest] = []
    model = None
    if isinstance(config, RouterConfig):
        ports = router_ports(config)
    elif isinstance(config, SchedulerConfig):
        if not config.host.startswith(UNIX_PREFIX):
            ports = [collect.PortRequest("--port", config.host, config.port)]
    elif isinstance(config, WorkerConfig):
        if config.simulate:
            return  # it reads no weights and takes no memory; that there is a tokenizer it says itself
        model = model_request(config)
    enforce(run_checks(collect.collect(ports, model), checks_for(name)))


def check_stack(router: RouterConfig, workers: Sequence[WorkerConfig]) -> None:
    """Check what a whole stack needs, whose workers stand model by model. Raises StartError with the first failure."""
    first = workers[0]
    if launched_place(os.environ, first.tensor_parallel_size) is not None:
        raise StartError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: a launcher starts workers, and `octavo serve` its own. Unset "
            "it and give --tensor-parallel-size, or launch `octavo worker` beside a router and a scheduler"
        )
    if first.simulate:
        enforce(run_checks(collect.collect(router_ports(router), None), checks_for("router", "scheduler")))
        return
    kinds = Counter((worker.model, worker.served_model_name) for worker in workers)
    requests = [replace(model_request(first), name=model, num_replicas=num) for (model, _), num in kinds.items()]
    found = collect_stack(router_ports(router), requests)
    enforce(list(dict.fromkeys(finding for facts in found for finding in run_checks(facts))))


def collect_stack(ports: Sequence[collect.PortRequest], models: Sequence[collect.ModelRequest]) -> list[Facts]:
    """What the checks look at for each model of a stack: ports with the first, memory beside what the others take."""
    found = [collect.collect(ports if index == 0 else (), model) for index, model in enumerate(models)]
    needs = [_need(facts.model) for facts in found]
    num_devices = sum(model.num_replicas * model.num_local_ranks for model in models)
    return [
        replace(
            facts,
            model=facts.model and replace(facts.model, other_models_bytes=sum(needs) - need),
            cards=facts.cards and replace(facts.cards, num_devices=num_devices),
        )
        for facts, need in zip(found, needs, strict=True)
    ]


def _need(model: ModelFacts | None) -> int:
    return 0 if model is None or model.memory is None else model.num_replicas * model.memory.total_bytes


def enforce(findings: Sequence[Finding]) -> None:
    """Log the warnings; raise StartError with the first failure, after logging any others."""
    for finding in warnings(findings):
        _LOG.warning("check %s", finding)
    failed = failures(findings)
    for finding in failed[1:]:
        _LOG.error("check %s", finding)
    if failed:
        raise StartError(str(failed[0]))


def router_ports(config: RouterConfig) -> list[collect.PortRequest]:
    ports = {"--http-port": config.http_port, "--grpc-port": config.grpc_port, "--health-port": config.health_port}
    hosts = {"--health-port": config.health_host or config.host}
    wanted = [(flag, port) for flag, port in ports.items() if port is not None]
    return [collect.PortRequest(flag, hosts.get(flag, config.host), port) for flag, port in wanted]


def model_request(config: WorkerConfig) -> collect.ModelRequest:
    """What a worker's options say about the memory its model will need."""
    place = launched_place(os.environ, config.tensor_parallel_size)
    return collect.ModelRequest(
        name=config.model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv=collect.KvOptions(
            config.block_size,
            config.max_num_seqs,
            config.num_kv_blocks,
            config.kv_cache_memory,
            config.kv_memory_fraction,
            config.swap_bytes,
        ),
        num_ranks=place.num_ranks if place else config.tensor_parallel_size,
        num_local_ranks=place.num_local_ranks if place else config.tensor_parallel_size,
        device=config.device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_dtype=config.kv_cache_dtype,
    )
