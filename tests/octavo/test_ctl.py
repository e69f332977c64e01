"""`octavo ctl` and `octavo top` against a real scheduler's port, and the lines they print."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from octavo.cli import main
from octavo.commands import ctl, top
from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.recorder import Recorder
from scheduler_svc.server import add_services
from tests.scheduler_svc.harness import Clock, Router, Shell, attaching, hello, watching


class Server:
    """A scheduler in a thread of its own; `ask` runs a coroutine there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shell: Shell) -> None:
        self._loop, self.shell = loop, shell

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.shell.port}"

    def ask(self, make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(30)


@contextmanager
def serving() -> Iterator[Server]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Shell, Any]:
        clock = Clock()
        recorder = Recorder(Scheduler(), salt=b"0123456789abcdef", max_bytes=1 << 20)
        engine = Engine(recorder, clock)
        server = grpc.aio.server()
        add_services(server, engine, ())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return Shell(engine, clock, channel, port), server

    shell, server = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield Server(loop, shell)
    finally:

        async def stop() -> None:
            await shell.channel.close(None)
            await server.stop(grace=0)

        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_an_operators_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:

        def run(*words: str) -> str:
            assert main([words[0], "--scheduler-address", server.address, *words[1:]]) == 0
            return capsys.readouterr().out

        async def fill() -> Router:
            router, worker = await watching(server.shell), await attaching(server.shell, hello(num_slots=1))
            for key in (1, 2):
                router.generate(request_id=f"r{key}", stream_key=key)
            await worker.plan()
            await server.shell.until(lambda found: found[0].num_waiting == 1)
            return router

        router = server.ask(fill)
        assert router.router_id
        head, line = run("ctl", "replicas").splitlines()
        assert head.split()[:3] == ["replica", "model", "state"]
        assert line.split()[:6] == ["worker-1", "m", "serving", "1/1", "1", "1/16"]
        assert '"num_waiting_tokens": "3"' in run("ctl", "load")
        told = run("ctl", "explain", "r2")
        assert "request r2 (#" in told
        assert "waiting, 0 before it, waits for" in told
        number = told.split("(#")[1].split(")")[0]
        assert run("ctl", "explain", f"#{number}") == told
        assert run("ctl", "update", "r2", "--priority", "-3", "--deadline", "60") == f"updated #{number}\n"
        assert "priority -3, 3 prompt tokens, 0 output tokens, deadline in 60.0 s" in run("ctl", "explain", "r2")
        screen = run("top", "--once", "--interval", "0.05")
        assert "queue m: 1 waiting (+0)" in screen
        assert "worker-1" in screen
        assert run("ctl", "cancel", "r2") == f"cancelled #{number}\n"
        assert run("ctl", "reset-prefix-cache") == "forgot 0 cached blocks\n"
        assert run("ctl", "drain", "worker-1") == "worker-1 takes no new sequences; 1 still run there\n"
        assert run("ctl", "undrain", "worker-1") == "worker-1 takes sequences again; 1 run there\n"
        path = tmp_path / "dump"
        assert f"octavo replay {path}" in run("ctl", "dump", str(path))
        assert main(["replay", str(path)]) == 0
        assert "every decision as recorded" in capsys.readouterr().out
        assert run("ctl", "set-alias", "chat", "m=3", "--sticky", "user") == "chat stands for m=3 on 1 router\n"
        assert run("ctl", "aliases").splitlines()[1].split() == ["chat", "m=3", "user"]
        assert run("ctl", "remove-alias", "chat") == "chat is taken back from 1 router\n"
        refused = {
            ("set-alias", "chat", "other=3"): "'other' is not served; models are m",
            ("remove-alias", "chat"): "no alias 'chat' was set here; there are none",
            ("cancel", "nobody"): "request 'nobody' is not live",
            ("drain", "nobody"): "no replica is called 'nobody'; attached are worker-1",
            ("undrain", "nobody"): "no replica is called 'nobody'; attached are worker-1",
            ("dump", "/nonexistent/x"): "/nonexistent/x cannot be written: No such file or directory; name a file in a",
            ("update", "r1"): "give --priority N, --deadline SECONDS or both",
        }
        for words, answer in refused.items():
            assert main(["ctl", "--scheduler-address", server.address, *words]) == 1
            assert answer in capsys.readouterr().err
        for words in (
            ("update", "r1", "--deadline", "0"),
            ("update", "r1", "--priority", "99999999999"),
            ("explain", "#99999999999999999999"),
            ("set-alias", "chat", "m=-1"),
            ("set-alias", "chat", "m=1", "m=2"),
        ):
            with pytest.raises(SystemExit) as refusal:
                main(["ctl", *words])
            assert refusal.value.code == 2
            assert "must be " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", [["ctl", "replicas"], ["top", "--once"]])
def test_where_no_scheduler_is(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], "--scheduler-address", "127.0.0.1:1", *command[1:]]) == 1
    assert "no scheduler answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["nonsense", "host:", ":8002", "127.0.0.1:99999", "127.0.0.1:0", "host:port", ""])
@pytest.mark.parametrize("command", [["ctl", "replicas"], ["top", "--once"]])
def test_what_is_no_address_is_said_so(command: list[str], address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], "--scheduler-address", address, *command[1:]]) == 1
    told = capsys.readouterr().err
    assert f"--scheduler-address {address}: it is neither HOST:PORT" in told
    assert "Use 127.0.0.1:8002" in told


def replica(name: str = "a", **fields: Any) -> pb.Replica:
    values: dict[str, Any] = {"name": name, "model": "m", "num_slots": 8, "num_blocks": 100, **fields}
    return pb.Replica(**values)


def load(now_s: float, *replicas: pb.Replica, **fields: Any) -> pb.GetStatisticsResponse:
    return pb.GetStatisticsResponse(now_ns=int(now_s * 1e9), replicas=replicas, **fields)


def test_the_address_may_follow_the_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        for words in (
            ["--scheduler-address", server.address, "replicas"],
            ["replicas", "--scheduler-address", server.address],
        ):
            assert main(["ctl", *words]) == 0
            assert "replica" in capsys.readouterr().out


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = load(
        10, replica(num_sampled_tokens=100, num_computed_tokens=500, num_steps=10, num_steps_by_limit={"blocks": 10})
    )
    now = load(
        12,
        replica(
            num_sampled_tokens=300,
            num_computed_tokens=1500,
            num_cached_tokens=1000,
            num_steps=30,
            num_preemptions=4,
            num_running=3,
            num_prefilling=1,
            num_used_blocks=50,
            num_cached_blocks=25,
            num_host_blocks=10,
            num_cached_host_blocks=5,
            has_kept_room=True,
            num_steps_by_limit={"blocks": 15, "slots": 15},
        ),
        queues=[pb.QueueLoad(model="m", num_waiting=7, start_interval_ns=250_000_000)],
        num_refused={"queue full": 3},
        num_following=2,
        num_expired=1,
    )
    text = "\n".join(top.frame(before, now, "here:1", 128))
    assert "output 100 tok/s   computed 500 tok/s   preempted 2.0/s" in text
    assert "queue m: 7 waiting (+7), one starts every 0.25 s" in text
    assert "following another's prompt 2   refused 3 queue full   past their deadline 1" in text
    row = next(line for line in text.splitlines() if line.startswith("a "))
    assert "serving keeps room" in row
    assert "3/8 (1 prefill)" in row
    assert "[######===...] 75%" in row
    assert "[===...] 50%" in row
    assert "100.0 ms" in row
    assert "50%" in row.split("ms")[1]
    assert "now: slots 75%, blocks 25%" in text
    assert "always: blocks 50%, slots 50%" in text


def test_a_replica_that_attached_anew_counts_from_its_beginning() -> None:
    before = load(0, replica(num_steps=100, num_sampled_tokens=9000, num_steps_by_limit={"slots": 100}))
    now = load(
        1, replica(num_steps=5, num_sampled_tokens=40, num_steps_by_limit={"blocks": 5}), replica("b", is_stalled=True)
    )
    text = "\n".join(top.frame(before, now, "x", 200))
    assert "output 40 tok/s" in text
    assert "now: blocks 100%" in text
    assert "stalled" in text


def test_tenants_are_shown_where_there_are_several() -> None:
    tenants = [pb.TenantLoad(tenant=f"t{n}", num_waiting=n, num_served_tokens=10 * n) for n in range(8)]
    text = "\n".join(top.frame(load(0), load(1, tenants=tenants), "x", 100))
    assert "tenants: t7 7 waiting, 70 tokens served; t6" in text
    assert "; 3 more" in text
    assert "no replica is attached" in text
    assert "no step was made" in text
    assert "tenants" not in "\n".join(top.frame(load(0), load(1, tenants=tenants[:1]), "x", 100))


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_a_screen_shows_everything_at_any_width(width: int) -> None:
    """What does not fit beside the rest goes below it: at 80 columns no line is longer, and nothing is cut off."""
    limits = {"blocks": 7, "slots": 5, "token budget": 3, "nothing waiting": 2, "prefill cap": 1}
    busy = {
        "num_running": 8,
        "num_prefilling": 2,
        "num_preemptions": 4711,
        "num_host_blocks": 10,
        "has_kept_room": True,
    }
    now = load(1, *(replica(f"w{n}", **busy, num_steps_by_limit=limits) for n in range(3)), num_routers=1)
    lines = top.frame(load(0), now, "127.0.0.1:8002", width)
    text = "\n".join(lines)
    for word in (
        "3 replicas, 1 router",
        "preempted",
        "4711",
        "out tok/s",
        "cached",
        "prefill cap 6%",
        "past their deadline",
    ):
        assert word in text
    assert width < 80 or max(map(len, lines)) <= width


def test_a_low_screen_says_what_it_leaves_out_and_shows_the_whole_first() -> None:
    now = load(1, *(replica(f"w{n}", num_steps_by_limit={"slots": 1}) for n in range(100)))
    lines = top.frame(load(0), now, "127.0.0.1:8002", 80)
    shown = top.cut(lines, 23)
    assert len(shown) == 23
    assert "always: slots 100%" in "\n".join(shown)
    assert shown[-1] == f"... {len(lines) - 22} more lines; see `octavo ctl replicas`"
    assert (top.cut(lines, len(lines)), len(top.cut(lines, 1)), len(top.cut(lines, 0))) == (lines, 1, 0)


def test_a_bar_shows_what_is_held_and_what_is_findable() -> None:
    assert top.bar(5, 3, 10, 10) == "[#####===..] 80%"
    assert top.bar(0, 0, 10, 4) == "[....] 0%"
    assert top.bar(99, 1, 100, 4) == "[####] 100%"
    assert top.bar(0, 0, 0, 4) == "-"


def test_decisions_are_told_with_their_numbers() -> None:
    decisions = [pb.Decision(age_ns=2_500_000_000, what="queued", reason="attempt 1")]
    decisions += [pb.Decision(what="scheduled", replica="w", num_blocks=3, num_cached_tokens=32)] * 3
    decisions += [pb.Decision(what="preempted", replica="w", reason="no free KV block", num_blocks=3)] * 4
    sequence = pb.SequenceExplanation(
        sequence_id=4, request_id="r", state="running", decisions=decisions, num_forgotten=9, num_prompt_tokens=5
    )
    lines = ctl.explanation_lines(sequence)
    assert lines[0] == "request r (#4): running"
    assert lines[2].split() == ["2.500", "s", "ago", "queued:", "attempt", "1"]
    assert lines[4].strip() == "... 9 decisions are not kept ..."
    assert lines[5].endswith("scheduled on w (3 blocks, 32 tokens cached)")
    assert lines[-1].endswith("preempted on w: no free KV block (3 blocks)")


def test_states_have_words() -> None:
    assert ctl.state_of(replica()) == "serving"
    assert ctl.state_of(replica(is_draining=True, num_running=1)) == "draining"
    assert ctl.state_of(replica(is_draining=True)) == "drained"
    assert ctl.state_of(replica(is_draining=True, is_stalled=True)) == "stalled"
