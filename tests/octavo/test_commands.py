"""Command lines: what each command takes, and the answers to what it does not take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo.cli import main
from octavo.commands import vllm_names
from octavo.commands.command_line import GROUPS, explain, parse
from octavo.commands.services import SERVICES, without_effect
from octavo.machine import usable_cpus
from octavo.options import OptionError, differences, flags_of, from_args, to_arguments
from octavo.stack.serve import child_specs, greeting, metrics_addresses, read_options, worker_devices
from router.config import RouterConfig
from scheduler_svc.config import SchedulerConfig
from tests.fakes.fake_gpus import H100, inventory
from worker_svc.config import WorkerConfig


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("--num-gpu-blocks-override", "--num-kv-blocks"),
        ("--num_gpu_blocks_override", "--num-kv-blocks"),
        ("--cpu-offload-gb", "weights stay"),
        ("--compilation-config", "nothing is compiled"),
        ("--no-enable-chunked-prefill", "always computed in chunks"),
        ("--pipeline-parallel-size", "not supported yet"),
        ("-tp", "spelled --tensor-parallel-size"),
        ("--port", "--http-port"),
        ("--ssl-keyfile", "--tls-key"),
    ],
)
def test_a_name_of_vllm_is_answered(flag: str, answer: str) -> None:
    told = explain(flag, "serve")
    assert told.startswith(flag)
    assert answer in told


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "octavo", "--help"]
        told = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (told.returncode, told.stderr) == (1, "")


def test_workers_of_a_stack_take_a_card_each() -> None:
    two_ranks = WorkerConfig(tensor_parallel_size=2)
    assert worker_devices(two_ranks, 2, inventory(H100, H100, H100, H100)) == ("cuda:0", "cuda:2")
    assert worker_devices(WorkerConfig(device="cuda:1"), 2, inventory(H100, H100, H100)) == ("cuda:1", "cuda:2")
    assert worker_devices(WorkerConfig(device="cpu"), 2, inventory(H100)) == ("cpu", "cpu")
    assert worker_devices(WorkerConfig(), 1, inventory(H100)) == ("auto",)


def test_every_answer_points_at_options_that_exist() -> None:
    ours = {flag for groups in GROUPS.values() for group in groups for flag in group.flags()}
    for name, text in vllm_names.RENAMED.items():
        # A port is the scheduler's option, and a model that of `octavo bench`.
        assert name not in ours or name in ("--port", "--model"), f"{name} is one of ours and needs no answer"
        mentioned = {word.strip(",.:;") for word in text.split() if word.startswith("--")}
        assert mentioned <= ours, (name, mentioned - ours)


def test_an_option_of_another_process_is_named_with_its_place() -> None:
    told = explain("--dtype=float32", "scheduler")
    assert told == (
        "--dtype has no effect in `octavo scheduler`; it is an option of `octavo serve` and `octavo worker`"
    )


def test_a_misspelled_option_is_answered_with_the_nearest() -> None:
    assert explain("--max-num-seq", "serve") == "--max-num-seq is not an option; did you mean --max-num-seqs?"
    assert explain("--max_num_seqs", "serve") == "--max_num_seqs is spelled --max-num-seqs here"
    assert explain("--xyzzy", "worker") == "--xyzzy is not an option; see `octavo worker --help`"


def test_each_unknown_option_is_answered_and_the_status_is_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("serve", "", ["--cpu-offload-gb", "4", "--dytpe", "float32"])
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("octavo serve: --cpu-offload-gb does not exist")
    assert second == "octavo serve: --dytpe is not an option; did you mean --dtype?"


def test_a_second_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("serve", "", ["one", "two"])
    assert capsys.readouterr().err == "octavo serve: 'two' is one argument too many\n"


def test_serve_takes_every_option_that_is_not_its_own_decision() -> None:
    flags = {flag for group in GROUPS["serve"] for flag in group.flags()}
    decided = {
        "--scheduler-address",
        "--token-listen",
        "--token-advertise",
        "--port",
    }
    everything = {flag for config in (RouterConfig, SchedulerConfig, WorkerConfig) for flag in flags_of(config)}
    assert everything - flags == decided


def test_serve_hands_each_option_to_the_process_it_belongs_to() -> None:
    words = "m --served-model-name n --http-port 9000 --no-enable-prefix-caching --max-num-seqs 8 --seed=-3"
    stack = read_options(words.split())
    commands = {spec.name: spec.command for spec in child_specs(stack)}
    assert list(commands) == ["router", "scheduler", "worker"]
    again: dict[str, object] = {
        name: from_args(SERVICES[name].config_class, parse(name, "", command[4:])) for name, command in commands.items()
    }
    address = f"127.0.0.1:{stack.scheduler.port}"
    assert again == {
        "router": RouterConfig("m", served_model_name="n", http_port=9000, scheduler_address=address, seed=-3),
        "scheduler": SchedulerConfig(
            port=stack.scheduler.port, enable_prefix_caching=False, metrics_port=stack.scheduler.metrics_port
        ),
        "worker": WorkerConfig(
            "m", "n", scheduler_address=address, max_num_seqs=8, metrics_port=stack.workers[0].metrics_port
        ),
    }


def test_serve_runs_as_many_workers_as_asked_and_shares_the_machine() -> None:
    stack = read_options(["m", "--data-parallel-size", "2", "--scheduler-port", "4711"])
    specs = child_specs(stack)
    assert [spec.name for spec in specs] == ["router", "scheduler", "worker-1", "worker-2"]
    differing = [(one, other) for one, other in zip(specs[2].command, specs[3].command, strict=True) if one != other]
    assert differing == [tuple(f"--metrics-port={worker.metrics_port}" for worker in stack.workers)]
    assert stack.scheduler.port == 4711
    assert stack.workers[0].scheduler_address == "127.0.0.1:4711"
    assert stack.workers[0].num_threads == max(1, usable_cpus() // 2)
    assert stack.workers[0].kv_memory_fraction == WorkerConfig().kv_memory_fraction / 2
    assert read_options(["--data-parallel-size", "2", "--num-threads", "3"]).workers[1].num_threads == 3
    simulated = read_options(["--data-parallel-size", "2", "--simulate"]).workers[0]
    assert without_effect(simulated) == []
    assert "octavo top --scheduler-address 127.0.0.1:4711" in "\n".join(greeting(stack.router))


def test_serve_runs_workers_of_every_model_that_is_named() -> None:
    words = ["/models/base", "--model", "coder=/models/coder", "--model", "hub=a/b", "--data-parallel-size", "2"]
    stack = read_options([*words, "--max-num-seqs", "8"])
    assert [(worker.model, worker.served_model_name) for worker in stack.workers] == [
        ("/models/base", None),
        ("/models/base", None),
        ("/models/coder", "coder"),
        ("/models/coder", "coder"),
        ("a/b", "hub"),
        ("a/b", "hub"),
    ]
    assert {worker.num_threads for worker in stack.workers} == {max(1, usable_cpus() // 6)}
    assert {worker.max_num_seqs for worker in stack.workers} == {8}
    assert len({worker.metrics_port for worker in stack.workers}) == 6
    specs = child_specs(stack)
    assert len({spec.name for spec in specs}) == 8
    assert "--model=coder=/models/coder" in specs[0].command
    assert greeting(stack.router)[1] == "Octavo serves base, coder, hub"
    with pytest.raises(OptionError, match="--model /models/x: is not NAME=MODEL"):
        read_options(["--model", "/models/x"])


def test_a_simulated_worker_names_what_changes_nothing() -> None:
    named = without_effect(WorkerConfig(simulate=True, dtype="float32", num_threads=2))
    assert [line.split(" has no effect")[0] for line in named] == ["--dtype", "--num-threads"]
    assert without_effect(WorkerConfig(simulated_costs="step_ms=1")) == [
        "--simulated-costs has no effect: --simulate is not given"
    ]


def test_a_router_names_what_changes_nothing() -> None:
    named = without_effect(RouterConfig(trusted_proxies="10.0.0.0/8", health_host="127.0.0.1"))
    assert [line.split(" has no effect")[0] for line in named] == ["--trusted-proxies", "--health-host"]
    assert without_effect(RouterConfig(trusted_proxies="10.0.0.1", allow_networks="10.0.0.0/8", health_port=0)) == []


def test_serve_chooses_ports_left_open_so_that_it_can_print_them() -> None:
    router = read_options(["--http-port", "0", "--grpc-port", "0"]).router
    assert router.http_port != 0
    assert router.grpc_port != 0
    text = "\n".join(greeting(router))
    assert "/ in a browser" in text
    assert f"http://127.0.0.1:{router.http_port}/v1" in text
    assert f"octavo chat --server 127.0.0.1:{router.grpc_port}" in text


def test_serve_says_where_each_process_is_scraped() -> None:
    stack = read_options(["m", "--http-port", "9000", "--metrics-port", "9100", "--data-parallel-size", "2"])
    addresses = metrics_addresses(stack)
    assert addresses == ["127.0.0.1:9100", "127.0.0.1:9101", "127.0.0.1:9102"]
    assert [line for line in greeting(stack.router, addresses) if "metrics" in line] == [
        f"  curl http://127.0.0.1:{port}/metrics" for port in (9000, 9100, 9101, 9102)
    ]
    with pytest.raises(OptionError, match=r"--metrics-port 65534: leaves no ports for 3 processes. Use at most 65533"):
        read_options(["m", "--metrics-port", "65534", "--data-parallel-size", "2"])
    chosen = metrics_addresses(read_options(["m", "--data-parallel-size", "3"]))
    assert len(set(chosen)) == 4


def test_an_option_that_another_overrules_is_named() -> None:
    config = WorkerConfig(num_kv_blocks=8, kv_memory_fraction=0.2)
    assert without_effect(config) == [
        "--kv-memory-fraction has no effect: --num-kv-blocks fixes the size of the KV cache"
    ]
    assert without_effect(WorkerConfig(num_kv_blocks=8)) == []


def test_differences_of_a_child_name_what_the_user_gave() -> None:
    stack = read_options(["--max-model-len", "512"])
    assert "--max-model-len 512 (default unset)" in differences(stack.workers[0])
    assert "--max-model-len=512" in to_arguments(stack.workers[0])


def test_an_unknown_command_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "did you mean `octavo serve`?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["version"]])
def test_help_and_version_load_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys; from octavo.cli import main; status = main(sys.argv[1:]); "
        "heavy = {'grpc', 'numpy', 'torch', 'transformers', 'asyncio', 'argparse'} & set(sys.modules); "
        "sys.exit(status or (f'loaded {heavy}' if heavy else 0))"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["octavo", "octavo.stack.serve", "octavo.commands.preflight", "octavo.checks.collect"]
)
def test_the_supervisor_loads_no_service_and_nothing_heavy(module: str) -> None:
    program = (
        f"import sys, {module}; "
        "loaded = {'grpc', 'numpy', 'torch', 'transformers', 'tokenizers', 'router.server', "
        "'scheduler_svc.server', 'worker_svc.server'} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
