"""`octavo ctl`: what operators see of a running scheduler and tell it, over ControlService.

Knows the wire and the terminal; decides nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToJson

from octavo.commands import ctl_aliases
from octavo.commands.control import CALL_TIMEOUT_S, add_address, connect, explain_failure
from octavo.commands.tables import columns
from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.option_parsing import INT32, number
from octavo.options import Limits
from octavo.process import StartError

_DEADLINES = Limits(0.001, 1e9)
_SEQUENCES = Limits(0, 2**64 - 1)


def ctl(words: Sequence[str]) -> int:
    """Do one thing and print what came of it. Raises StartError, with the cause, when it was refused."""
    namespace = _parser().parse_args(words)
    run: Callable[[Any, argparse.Namespace], int] = namespace.run
    channel, stub = connect(namespace)
    try:
        return run(stub, namespace)
    except grpc.RpcError as error:
        raise explain_failure(namespace.scheduler_address, error) from None
    finally:
        channel.close()


def _parser() -> argparse.ArgumentParser:
    description = "Look into a running scheduler and steer it."
    parser = argparse.ArgumentParser(prog="octavo ctl", description=description, allow_abbrev=False)
    add_address(parser)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, help: str, run: Callable[[Any, argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        added.set_defaults(run=run)
        add_address(added, again=True)
        return added

    command("replicas", "List the replicas with their load.", _replicas)
    command("load", "Print the whole load as JSON.", _load)
    explain = command("explain", "Tell each decision that touched a request, and what it waits for.", _explain)
    update = command("update", "Change the priority or the deadline of a request.", _update)
    cancel = command("cancel", "End a request.", _cancel)
    for named in (explain, update, cancel):
        named.add_argument(
            "request", type=_name, metavar="REQUEST", help="The request id, or #N for the sequence of that number."
        )
    update.add_argument("--priority", type=number(int, INT32), metavar="N", help="Smaller is served first.")
    update.add_argument("--deadline", type=number(float, _DEADLINES), metavar="SECONDS", help="From now.")
    drain = command("drain", "Let a replica take no new sequences.", _drain)
    undrain = command("undrain", "Let a draining replica take sequences again.", _undrain)
    for which in (drain, undrain):
        which.add_argument("replica", metavar="REPLICA", help="Its name, as `octavo ctl replicas` lists it.")
    ctl_aliases.add_commands(command)
    command("reset-prefix-cache", "Forget cached prefixes that no running sequence holds.", _reset)
    dump = command("dump", "Write the flight recorder's content to a file.", _dump)
    dump.add_argument("file", metavar="FILE", help="For `octavo replay`; - is the standard output.")
    return parser


def _name(text: str) -> pb.SequenceName:
    digits = text.removeprefix("#")
    if digits != text and digits.isascii() and digits.isdecimal():
        return pb.SequenceName(sequence_id=number(int, _SEQUENCES)(digits))
    return pb.SequenceName(request_id=text)


def _replicas(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.ListReplicas(pb.ListReplicasRequest(), timeout=CALL_TIMEOUT_S)
    print("\n".join(replica_table(response.replicas)))
    return 0


def replica_table(replicas: Sequence[pb.Replica]) -> list[str]:
    """One line a replica."""
    head = ("replica", "model", "state", "running", "waiting", "KV blocks", "cached", "host", "preempted", "steps")
    rows = [
        (
            replica.name,
            replica.model,
            state_of(replica),
            f"{replica.num_running}/{replica.num_slots}",
            str(replica.num_waiting),
            f"{replica.num_used_blocks}/{replica.num_blocks}",
            str(replica.num_cached_blocks),
            f"{replica.num_cached_host_blocks}/{replica.num_host_blocks}" if replica.num_host_blocks else "-",
            str(replica.num_preemptions),
            str(replica.num_steps),
        )
        for replica in replicas
    ]
    return columns([head, *rows])


def state_of(replica: pb.Replica) -> str:
    """A replica's state in a word."""
    if replica.is_stalled:
        return "stalled"
    if replica.is_draining:
        return "draining" if replica.num_running else "drained"
    return "serving"


def _load(stub: Any, namespace: argparse.Namespace) -> int:
    load = stub.GetStatistics(pb.GetStatisticsRequest(), timeout=CALL_TIMEOUT_S)
    print(MessageToJson(load, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    return 0


def _explain(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.Explain(pb.ExplainRequest(name=namespace.request), timeout=CALL_TIMEOUT_S)
    for sequence in response.sequences:
        print("\n".join(explanation_lines(sequence)))
    return 0


def explanation_lines(sequence: pb.SequenceExplanation) -> list[str]:
    """One sequence and what was decided about it."""
    state = sequence.state
    if sequence.HasField("position"):
        state += f", {sequence.position} before it"
    if sequence.waits_for:
        state += f", waits for {sequence.waits_for}"
    facts = [f"priority {sequence.priority}", f"{sequence.num_prompt_tokens} prompt tokens"]
    facts.append(f"{sequence.num_output_tokens} output tokens")
    if sequence.HasField("deadline_in_ns"):
        facts.append(f"deadline in {sequence.deadline_in_ns / 1e9:.1f} s")
    lines = [f"request {sequence.request_id or '-'} (#{sequence.sequence_id}): {state}", f"  {', '.join(facts)}"]
    for index, decision in enumerate(sequence.decisions):
        lines.append(f"  {decision.age_ns / 1e9:9.3f} s ago  {_decision(decision)}")
        if index == len(sequence.decisions) // 4 - 1 and sequence.num_forgotten:
            lines.append(f"{'':18}  ... {sequence.num_forgotten} decisions are not kept ...")
    return lines


def _decision(decision: pb.Decision) -> str:
    where = f" on {decision.replica}" if decision.replica else ""
    counts = [
        f"{number} {name}"
        for number, name in (
            (decision.num_blocks, "blocks"),
            (decision.num_cached_tokens, "tokens cached"),
            (decision.num_recomputed_tokens, "tokens recomputed"),
        )
        if number
    ]
    reason = f": {decision.reason}" if decision.reason else ""
    return f"{decision.what}{where}{reason}" + (f" ({', '.join(counts)})" if counts else "")


def _update(stub: Any, namespace: argparse.Namespace) -> int:
    if namespace.priority is None and namespace.deadline is None:
        raise StartError("update changes nothing: give --priority N, --deadline SECONDS or both")
    request = pb.UpdateRequest(name=namespace.request, priority=namespace.priority)
    if namespace.deadline is not None:
        request.deadline_ns = int(namespace.deadline * 1e9)
    response = stub.Update(request, timeout=CALL_TIMEOUT_S)
    print(f"updated {_sequences(response.sequence_ids)}")
    return 0


def _cancel(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.Cancel(pb.CancelRequest(name=namespace.request), timeout=CALL_TIMEOUT_S)
    print(f"cancelled {_sequences(response.sequence_ids)}")
    return 0


def _sequences(sequence_ids: Sequence[int]) -> str:
    return ", ".join(f"#{sequence_id}" for sequence_id in sequence_ids)


def _drain(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.Drain(pb.DrainRequest(replica=namespace.replica), timeout=CALL_TIMEOUT_S)
    print(f"{namespace.replica} takes no new sequences; {response.num_running} still run there")
    return 0


def _undrain(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.Undrain(pb.UndrainRequest(replica=namespace.replica), timeout=CALL_TIMEOUT_S)
    print(f"{namespace.replica} takes sequences again; {response.num_running} run there")
    return 0


def _reset(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=CALL_TIMEOUT_S)
    print(f"forgot {response.num_blocks} cached blocks")
    return 0


def _dump(stub: Any, namespace: argparse.Namespace) -> int:
    data = b"".join(piece.data for piece in stub.DumpRecorder(pb.DumpRecorderRequest()))
    if namespace.file == "-":
        sys.stdout.buffer.write(data)
        return 0
    try:
        Path(namespace.file).write_bytes(data)
    except OSError as error:
        remedy = "name a file in a folder that you may write to, or - for the standard output"
        raise StartError(f"{namespace.file} cannot be written: {error.strerror}; {remedy}") from error
    print(f"wrote {len(data)} bytes to {namespace.file}; see `octavo replay {namespace.file}`")
    return 0
