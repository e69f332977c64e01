"""`octavo serve`: the whole stack under one supervisor, from the options to the addresses it prints.

Decides the internal addresses and what each process is told; starting and ending them is the supervisor's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.commands import command_line
from octavo.commands.command_line import ServeConfig
from octavo.commands.services import say_cause
from octavo.gpus import CardFacts, GpuInventory, collect_gpus
from octavo.logs import setup_logging
from octavo.machine import usable_cpus
from octavo.options import OptionError, differences, from_args, secret_environment, secrets_of, to_arguments
from octavo.ports import free_port, free_ports
from octavo.stack import readiness
from octavo.stack.console import Console, progress_bar
from octavo.stack.supervisor import ChildSpec, Stages, Supervisor
from router.config import RouterConfig
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

_LOG = logging.getLogger(__name__)

DEMO_PROMPT = "In two sentences: why is the sky blue?"

_LOOPBACK = "127.0.0.1"
_INTERNAL_TLS = " --internal-tls-cert ME.pem --internal-tls-key ME.key --internal-tls-ca CA.pem"
_POLL_S = 0.1
_CLOSING_S = 10.0
"""What a router may take to end once its requests have, by whatever end."""
_LAST_PORT = 65535


@dataclass(frozen=True)
class StackConfig:
    """The configs of all processes of one stack, with every port chosen."""

    serve: ServeConfig
    router: RouterConfig
    scheduler: SchedulerConfig
    workers: tuple[WorkerConfig, ...]
    """One a process; those of the first model come first."""


def serve(words: Sequence[str]) -> int:
    """Run the stack until Ctrl-C; returns the exit status."""
    try:
        stack = read_options(words)
    except OptionError as error:
        command_line.refuse("octavo serve", [str(error)])
    for entry in secrets_of(RouterConfig):
        os.environ.pop(entry.variable, None)  # the router is given it, and no other child
    setup_logging("serve", stack.router.log_level, stack.router.log_format)
    for line in differences(stack.serve):  # each child prints its own
        _LOG.info("option %s", line)
    try:
        return asyncio.run(_supervise(stack))
    except Exception as error:
        return say_cause("octavo serve", "all", error)


def read_options(words: Sequence[str]) -> StackConfig:
    """Parse `octavo serve`'s words into one config a process. Raises OptionError."""
    namespace = command_line.parse(
        "serve", "Serve MODEL: a router, a scheduler and a worker under one supervisor.", words
    )
    serve_config = from_args(ServeConfig, namespace)
    scheduler_port = serve_config.scheduler_port or free_port(_LOOPBACK)
    router = from_args(RouterConfig, namespace, scheduler_address=f"{_LOOPBACK}:{scheduler_port}")
    num_workers = serve_config.data_parallel_size * (1 + len(router.further_sources))
    metrics_ports = _metrics_ports(serve_config, num_workers)
    scheduler = from_args(
        SchedulerConfig,
        namespace,
        host=_LOOPBACK,
        port=scheduler_port,
        metrics_port=metrics_ports[0],
        max_num_seqs=None,
        max_num_batched_tokens=None,
    )
    worker = from_args(WorkerConfig, namespace, scheduler_address=router.scheduler_address, metrics_port=0)
    others = router.further_sources.items()
    models = [worker, *(replace(worker, model=source, served_model_name=name) for name, source in others)]
    workers = [_share(one, num_workers) for one in models for _ in range(serve_config.data_parallel_size)]
    one = num_workers == 1  # then there is nothing to deal out, and looking for cards would only cost time
    devices = (worker.device,) if one else worker_devices(worker, num_workers, collect_gpus())
    placed = zip(workers, devices, metrics_ports[1:], strict=True)
    return StackConfig(
        serve_config,
        _with_ports(router),
        scheduler,
        tuple(replace(each, device=device, metrics_port=port) for each, device, port in placed),
    )


def child_specs(stack: StackConfig) -> tuple[ChildSpec, ...]:
    """The processes of the stack, in the order in which they drain: requests end before what computes them."""
    python = (sys.executable, "-m", "octavo")
    workers = stack.workers
    names = ["worker"] if len(workers) == 1 else [f"worker-{number}" for number, _ in enumerate(workers, 1)]
    return (
        ChildSpec("router", (*python, "router", *to_arguments(stack.router)), secret_environment(stack.router)),
        ChildSpec("scheduler", (*python, "scheduler", *to_arguments(stack.scheduler))),
        *(
            ChildSpec(name, (*python, "worker", *to_arguments(worker)))
            for name, worker in zip(names, workers, strict=True)
        ),
    )


def worker_devices(worker: WorkerConfig, num_workers: int, inventory: GpuInventory) -> tuple[str, ...]:
    """--device of each of so many workers: on GPUs they take one card a rank, one worker after the other."""
    cards = CardFacts(inventory, worker.device)
    if num_workers == 1 or worker.simulate or not cards.on_gpu:
        return (worker.device,) * num_workers
    return tuple(f"cuda:{cards.first + index * worker.tensor_parallel_size}" for index in range(num_workers))


def metrics_addresses(stack: StackConfig) -> list[str]:
    """Where the scheduler and the workers are scraped, host:port; the router is on its HTTP port."""
    host = reachable_host(stack.scheduler.metrics_host)
    ports = (stack.scheduler.metrics_port, *(worker.metrics_port for worker in stack.workers))
    return [f"{host}:{port}" for port in ports]


def greeting(router: RouterConfig, metrics: Sequence[str] = ()) -> list[str]:
    """Where the stack listens, and how to talk to it and look into it; `metrics` are those of `metrics_addresses`."""
    host = reachable_host(router.host)
    http, grpc = f"{host}:{router.http_port}", f"{host}:{router.grpc_port}"
    scheme, curl, options, arguments = "http", "curl", "", ""
    shown = _INTERNAL_TLS if router.has_internal_tls else ""
    if router.tls_cert is not None:
        scheme, curl, options, arguments = "https", "curl --cacert CA.pem", " --tls-ca CA.pem", 'ca="CA.pem"'
        if router.tls_client_ca is not None:
            curl += " --cert ME.pem --key ME.key"
            options += " --tls-cert ME.pem --tls-key ME.key"
            arguments += ', cert="ME.pem", key="ME.key"'
        arguments = f", tls=octavo.Tls({arguments})"
    if router.asks_for_keys:
        curl += ' -H "Authorization: Bearer $OCTAVO_API_KEY"'
    return [
        "",
        f"Octavo serves {', '.join((router.name, *router.further_sources))}",
        f"  HTTP   {scheme}://{http}/v1",
        f"  gRPC   {grpc}",
        "Talk to it:" if not router.asks_for_keys else "Talk to it, with a key in OCTAVO_API_KEY:",
        *([f"  {scheme}://{http}/ in a browser"] if router.chat_page else []),
        f"  octavo chat --server {grpc}{options}",
        f"  {curl} {scheme}://{http}/v1/completions -H 'Content-Type: application/json' \\",
        '       -d \'{"prompt": "Once upon a time", "max_tokens": 32}\'',
        f'  python -c \'import octavo; print(octavo.Client("{grpc}"{arguments}).generate("Once upon a time").text)\'',
        "Look into it:",
        f"  octavo top --scheduler-address {router.scheduler_address}{shown}",
        f"  {curl} {scheme}://{http}/metrics",
        *(f"  curl http://{address}/metrics" for address in metrics),
        "Ctrl-C drains and stops; a second Ctrl-C stops at once.",
        "",
    ]


def reachable_host(host: str) -> str:
    """An address to connect to, for an address that was listened on."""
    return {"0.0.0.0": _LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _share(worker: WorkerConfig, num_workers: int) -> WorkerConfig:
    """One of so many workers on this machine: its part of the cores, and of the memory where no size was given."""
    if num_workers == 1 or worker.simulate:
        return worker
    num_threads = worker.num_threads or max(1, usable_cpus() // (num_workers * worker.tensor_parallel_size))
    fraction = max(0.01, worker.kv_memory_fraction / num_workers)
    return replace(worker, num_threads=num_threads, kv_memory_fraction=fraction)


def _metrics_ports(serve: ServeConfig, num_workers: int) -> tuple[int, ...]:
    """The scheduler's, then one a worker: following each other where the first is given, else free ones."""
    count = 1 + num_workers
    last = serve.metrics_port + count - 1
    if last > _LAST_PORT:
        remedy = f"Use at most {_LAST_PORT - count + 1}, or 0 for free ones"
        raise OptionError("--metrics-port", serve.metrics_port, f"leaves no ports for {count} processes", remedy)
    if serve.metrics_port:
        return tuple(range(serve.metrics_port, serve.metrics_port + count))
    return tuple(free_ports(count, _LOOPBACK))


def _with_ports(router: RouterConfig) -> RouterConfig:
    """Choose the ports that were left open: the supervisor must know where its router will listen."""
    given = (router.http_port, router.grpc_port)
    free = [port for port in free_ports(3, router.host) if port not in given]
    router = replace(router, http_port=router.http_port or free[0], grpc_port=router.grpc_port or free[1])
    if router.health_port is None and (router.tls_cert is not None or router.allow_networks):
        # The supervisor asks whether its router is ready from this machine, and holds no certificate.
        return replace(router, health_host=_LOOPBACK, health_port=free_port(_LOOPBACK))
    return router


async def _supervise(stack: StackConfig) -> int:
    console = Console(sys.stderr)
    probed, port = stack.router.host, stack.router.http_port
    if stack.router.health_port is not None:
        probed, port = stack.router.health_host or stack.router.host, stack.router.health_port
    host = reachable_host(probed).strip("[]")
    names = (stack.router.name, *stack.router.further_sources)

    async def wait_ready() -> None:
        while True:
            answer = await readiness.ask(host, port)
            if answer is not None and answer.ready and not answer.waiting_for.intersection(names):
                return
            if answer is not None and answer.total:
                console.status(progress_bar(answer.phase, answer.done, answer.total))
            await asyncio.sleep(_POLL_S)

    async def announce() -> None:
        if stack.serve.demo:
            await _demonstrate(stack.router)
        print("\n".join(greeting(stack.router, metrics_addresses(stack))), flush=True)

    stages = Stages(lambda: _check(stack), wait_ready, announce)
    supervisor = Supervisor(
        child_specs(stack), stages, console, drain_timeout_s=stack.router.drain_timeout + _CLOSING_S
    )
    return await supervisor.run()


def _check(stack: StackConfig) -> None:
    """Runs beside the children's imports. None of them listens yet, so a port in use is somebody else's."""
    from octavo.commands import preflight

    preflight.check_stack(stack.router, stack.workers)


async def _demonstrate(router: RouterConfig) -> None:
    if router.tls_cert is not None or router.key_file is not None:
        _LOG.warning("--demo shows nothing: it speaks no TLS and knows no key of --key-file")
        return
    await _show_answer(f"{reachable_host(router.host)}:{router.grpc_port}", secret_environment(router))


async def _show_answer(address: str, environment: Mapping[str, str]) -> None:
    """Ask the stack the sample prompt through the command a user would type, and let it stream to the terminal."""
    # Greedy: the same answer on every machine, and the likeliest one of a model that is small.
    command = [sys.executable, "-m", "octavo", "chat", "--server", address, "--message", DEMO_PROMPT]
    command += ["--temperature", "0"]
    print(f"\n> {DEMO_PROMPT}\n", flush=True)
    asked = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        await asked.wait()
    finally:
        if asked.returncode is None:
            asked.terminate()
            await asked.wait()
