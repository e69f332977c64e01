"""Between protobuf and the core's plain data, in both directions; nowhere else.

Knows both vocabularies. Decides nothing but what the wire leaves open: which gRPC status a refusal or an end is.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2 as types_pb
from octavo.internal.v1 import worker_pb2 as worker_pb
from scheduler_svc.core.plan import Admission, StepPlan, StepResult
from scheduler_svc.core.types import (
    Ended,
    EndReason,
    Event,
    Finished,
    FinishReason,
    Preempted,
    Progress,
    Queued,
    RefusalReason,
    Refused,
    ReplicaSpec,
    Request,
    Scheduled,
)

REFUSAL_STATUS = {
    RefusalReason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    RefusalReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.TOO_LONG: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalReason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalReason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalReason.POISON: grpc.StatusCode.INTERNAL,
}

END_STATUS = {
    EndReason.CANCELLED: grpc.StatusCode.CANCELLED,
    EndReason.REPLICA_LOST: grpc.StatusCode.ABORTED,
    EndReason.UNDELIVERED: grpc.StatusCode.ABORTED,
    EndReason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def request_from_wire(message: pb.GenerateRequest, sequence_id: int) -> Request:
    """The core's request. Token ids become arrays; the sampling message is passed through as it is.

    Raises Refused for a task that nothing here can do.
    """
    if message.task != types_pb.TASK_GENERATE:
        name = types_pb.Task.Name(message.task) if message.task in types_pb.Task.values() else message.task
        raise Refused(RefusalReason.INVALID, "task", name, "TASK_GENERATE", "ask for that")
    sampling = message.sampling
    wants_prompt_logprobs = sampling.HasField("num_prompt_logprobs")
    return Request(
        sequence_id=sequence_id,
        model=message.model,
        prompt_token_ids=array("I", message.prompt_token_ids),
        max_tokens=sampling.max_tokens,
        prior_token_ids=array("I", message.prior_token_ids),
        sampling=sampling,
        prompt_logprobs_start=sampling.prompt_logprobs_start if wants_prompt_logprobs else None,
        adapter=message.adapter,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        priority=message.priority,
        deadline_ns=message.deadline_ns if message.HasField("deadline_ns") else None,
        age_ns=message.age_ns,
        group_id=message.group_id,
        group_size=message.group_size or 1,
        router_id=message.router_id,
        stream_key=message.stream_key,
        attempt=message.attempt,
        crash_group_sizes=tuple(message.crash_group_sizes),
        queue_events=message.queue_events,
        request_id=message.request_id,
    )


def replica_from_wire(hello: worker_pb.Hello, replica_id: int) -> ReplicaSpec:
    """The core's replica. Raises ValueError, naming the field, on sizes that cannot serve."""
    return ReplicaSpec(
        replica_id=replica_id,
        name=hello.name,
        incarnation=hello.incarnation,
        model=hello.model.name,
        fingerprint=hello.model.fingerprint,
        max_model_len=hello.model.max_model_len,
        block_size=hello.block_size,
        num_device_blocks=hello.num_device_blocks,
        num_slots=hello.num_slots,
        max_step_tokens=hello.max_step_tokens,
        num_host_blocks=hello.num_host_blocks,
    )


def result_from_wire(message: worker_pb.StepResult) -> StepResult:
    """The core's step result."""
    reasons = message.finish_reasons
    return StepResult(
        incarnation=message.incarnation,
        step=message.step,
        num_sampled=message.num_sampled,
        token_ids=message.token_ids,
        finishes={row: FinishReason(reason) for row, reason in enumerate(reasons) if reason} if any(reasons) else {},
        undelivered_rows=message.undelivered_rows,
        duration_ns=message.duration_ns,
        copy_ns=message.copy_ns,
    )


def plan_to_wire(plan: StepPlan) -> worker_pb.StepPlan:
    """The plan as a worker takes it."""
    return worker_pb.StepPlan(
        incarnation=plan.incarnation,
        step=plan.step,
        released_slots=plan.released_slots,
        admissions=[_admission_to_wire(admission) for admission in plan.admissions],
        append_slots=plan.append_slots,
        append_counts=plan.append_counts,
        append_block_ids=plan.append_block_ids,
        row_slots=plan.row_slots,
        row_starts=plan.row_starts,
        row_counts=plan.row_counts,
        demote_device_ids=plan.demote_device_ids,
        demote_host_ids=plan.demote_host_ids,
        promote_host_ids=plan.promote_host_ids,
        promote_device_ids=plan.promote_device_ids,
    )


def _admission_to_wire(admission: Admission) -> worker_pb.Admission:
    return worker_pb.Admission(
        slot=admission.slot,
        token_ids=admission.token_ids,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=admission.block_ids,
        # What a request brought in request_from_wire.
        sampling=cast(types_pb.SamplingParams, admission.sampling),
        router_id=admission.router_id,
        stream_key=admission.stream_key,
        attempt=admission.attempt,
        adapter=admission.adapter,
    )


@dataclass(frozen=True)
class EndStatus:
    """The gRPC status with which an attempt ends without being complete."""

    code: grpc.StatusCode
    message: str
    detail: Message | None = None
    """What else the status carries: ReplicaLost, or RetryInfo."""


def refusal_to_wire(refused: Refused) -> EndStatus:
    """A refusal; one for want of room tells when there should be some."""
    detail = None
    if refused.retry_after_ns is not None:
        detail = error_details_pb2.RetryInfo()
        detail.retry_delay.FromNanoseconds(refused.retry_after_ns)
    return EndStatus(REFUSAL_STATUS[refused.reason], str(refused), detail)


ROUTER_GONE = EndStatus(
    grpc.StatusCode.UNAVAILABLE, "the router's Watch has ended; open it again and use the router_id that it gives"
)
# CANCELLED would not do: routers read it as the scheduler going away, and try again.
CANCELLED_BY_OPERATOR = EndStatus(grpc.StatusCode.FAILED_PRECONDITION, "the request was cancelled by an operator")
SHUTTING_DOWN = EndStatus(grpc.StatusCode.UNAVAILABLE, "the scheduler is shutting down; try again")


def event_to_wire(event: Event, replica: worker_pb.Hello | None) -> pb.GenerateResponse | EndStatus:
    """An event as a router takes it. `replica` is the one that a Scheduled or Ended event names."""
    match event:
        case Queued():
            return pb.GenerateResponse(queued=pb.Queued(position=event.position, eta_ns=event.eta_ns))
        case Scheduled():
            return pb.GenerateResponse(scheduled=_scheduled_to_wire(event, replica))
        case Preempted():
            return pb.GenerateResponse(preempted=pb.Preempted(reason=event.reason, num_blocks=event.num_blocks))
        case Progress():
            return pb.GenerateResponse(progress=pb.Progress(num_output_tokens=event.num_output_tokens))
        case Finished():
            finished = pb.Finished(num_output_tokens=event.num_output_tokens)
            finished.finish_reason = event.reason.value  # type: ignore[assignment]  # the two enums share their values
            return pb.GenerateResponse(finished=finished)
        case Ended():
            return _end_to_wire(event, replica)


def _scheduled_to_wire(event: Scheduled, replica: worker_pb.Hello | None) -> pb.Scheduled:
    if replica is None:
        raise ValueError(f"{event!r} names no attached replica")
    return pb.Scheduled(
        replica=replica.name,
        cached_tokens=event.cached_tokens,
        recomputed_tokens=event.recomputed_tokens,
        queue_ns=event.queue_ns,
        numerics=replica.model.numerics,
        batch_invariant=replica.model.batch_invariant,
    )


def _end_to_wire(event: Ended, replica: worker_pb.Hello | None) -> EndStatus:
    code, name = END_STATUS[event.reason], replica.name if replica is not None else ""
    if event.replica_lost is None:
        return EndStatus(code, event.reason.value)
    lost = pb.ReplicaLost(replica=name, rows_in_step=event.replica_lost.rows_in_step)
    return EndStatus(code, f"replica {name} was lost", lost)
