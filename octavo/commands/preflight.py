"""Runs the checks before a start: collects what the options ask for, then judges it.

Knows which options mean which facts; the judging is octavo.checks'.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from octavo.addresses import UNIX_PREFIX
from octavo.checks import collect
from octavo.checks.registry import checks_for, failures, run_checks, warnings
from octavo.checks.types import Finding
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


def check_stack(router: RouterConfig, worker: WorkerConfig, num_workers: int) -> None:
    """Check what a whole stack of so many workers needs. Raises StartError with the first failure."""
    if launched_place(os.environ, worker.tensor_parallel_size) is not None:
        raise StartError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: a launcher starts workers, and `octavo serve` its own. Unset "
            "it and give --tensor-parallel-size, or launch `octavo worker` beside a router and a scheduler"
        )
    if worker.simulate:
        enforce(run_checks(collect.collect(router_ports(router), None), checks_for("router", "scheduler")))
    else:
        model = replace(model_request(worker), num_replicas=num_workers)
        enforce(run_checks(collect.collect(router_ports(router), model)))


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
