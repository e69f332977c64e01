"""A worker process of the simulation: attaches, executes plans one after the other, sends tokens and results.

Does what `worker_svc` does around its runner, with the simulated replica as runner. Adds logprobs, made up from tokens
and positions, so that what belongs together can be told. May die at any point of a step.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import grpc.aio

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2, worker_pb2
from scheduler_svc.core.plan import Admission, StepPlan, StepResult
from scheduler_svc.core.types import ReplicaSpec
from tests.fakes.simulated_replica import Delivery, SimulatedReplica
from tests.simulation.answers import Model, SimulatedModel
from tests.simulation.network import Call, Network
from tests.simulation.schedulers import SimulatedScheduler

_RETRY_S = 0.1


class WorkerDied(Exception):
    """The process ended itself in the middle of a step."""


def output_logprob(token_id: int, position: int) -> float:
    """The made-up logprob of an output token; `position` is its place in the output."""
    return -float(1 + token_id + 1000 * position)


def prompt_logprob(token_id: int, position: int) -> float:
    """The made-up logprob of a prompt token."""
    return -0.5 - float(token_id + 1000 * position)


class SimulatedWorker:
    """One process; `run` until it is cancelled or dies."""

    def __init__(self, network: Network, scheduler: SimulatedScheduler, spec: ReplicaSpec, model: Model) -> None:
        self._network, self._scheduler, self._spec, self._model = network, scheduler, spec, model
        self.poison_token_id: int | None = None
        """A prompt token whose computation kills the process."""
        self.longest_step_s = 0.01
        self.refusal = 0.0
        """Probability that a router does not take a step's tokens."""
        self.numeric_errors: set[int] = set()
        """Streams whose next sample fails."""
        self.call: Call | None = None
        self._process = network.rng.getrandbits(64)
        self._prompts: dict[int, Admission] = {}

    @property
    def name(self) -> str:
        return self._spec.name

    async def run(self) -> None:
        """Attaches again and again. Raises WorkerDied, and PlanDisagrees for a plan that is wrong."""
        while True:
            try:
                await self._attach_once()
            except grpc.aio.AioRpcError as error:
                self._network.trace.note(f"{self.name} lost its attachment: {error.details()}")
            await asyncio.sleep(_RETRY_S)

    async def _attach_once(self) -> None:
        incarnation = self._network.rng.getrandbits(64)
        spec, model = replace(self._spec, incarnation=incarnation), self._model
        replica = SimulatedModel(spec, model.vocab_size, is_fickle=model.is_fickle)
        replica.numeric_errors = self.numeric_errors
        replica.copy_ns = self._network.rng.choice((1_000, 10_000_000))
        endpoints: dict[int, str] = {}
        self._prompts = {}
        call = self.call = self._scheduler.attach(self.name)
        call.say(pb.AttachRequest(starting=pb.WorkerStarting(name=self.name, phase=types_pb2.StartPhase(name="kv"))))
        call.say(pb.AttachRequest(hello=self._hello(incarnation)))
        async for response in call:
            match response.WhichOneof("message"):
                case "router_endpoint":
                    endpoints[response.router_endpoint.router_id] = response.router_endpoint.endpoint
                case "router_gone":
                    del endpoints[response.router_gone]
                case "plan":
                    await self._step(call, replica, plan_from_wire(response.plan), endpoints)

    async def _step(self, call: Call, replica: SimulatedReplica, plan: StepPlan, endpoints: dict[int, str]) -> None:
        rng = self._network.rng
        for admission in plan.admissions:
            assert admission.router_id in endpoints, f"slot {admission.slot}: router {admission.router_id} is unknown"
        self._network.trace.note(f"{self.name} runs step {plan.step}: {_digest(plan)}")
        duration_s = self.longest_step_s * rng.random()
        await asyncio.sleep(duration_s)
        self._die_of_poison(plan)
        present = {admission.router_id for admission in self._prompts.values()}
        present |= {admission.router_id for admission in plan.admissions}
        replica.unreachable_routers = {
            router_id for router_id in sorted(present) if router_id not in endpoints or rng.random() < self.refusal
        }
        replica.receive(plan)
        prompts = self._prompt_logprobs(plan)
        outcome = replica.run()
        batches: dict[int, worker_pb2.TokenBatch] = defaultdict(worker_pb2.TokenBatch)
        for router_id, entry in prompts:
            batches[router_id].prompt_logprobs.append(entry)
        for delivery in outcome.deliveries:
            _add_delivery(batches[delivery.router_id], delivery)
        for router_id, batch in batches.items():
            if router_id not in replica.unreachable_routers:
                self._network.push(self.name, endpoints[router_id], batch.SerializeToString())
        if rng.random() < 0.5:
            await asyncio.sleep(0)  # it may die here: tokens sent, result not
        call.say(pb.AttachRequest(result=result_to_wire(outcome.result, int(duration_s * 1e9))))

    def _die_of_poison(self, plan: StepPlan) -> None:
        slots = set(plan.row_slots)
        for admission in plan.admissions:
            if admission.slot in slots and self.poison_token_id in admission.token_ids[: admission.num_prompt_tokens]:
                raise WorkerDied(self.name)

    def _prompt_logprobs(self, plan: StepPlan) -> list[tuple[int, worker_pb2.PromptLogprobs]]:
        """Of each row that wants them: computing positions [a, b) yields those of a + 1 ... b."""
        for slot in plan.released_slots:
            del self._prompts[slot]
        self._prompts.update({admission.slot: admission for admission in plan.admissions})
        found = []
        for slot, first, count in zip(plan.row_slots, plan.row_starts, plan.row_counts, strict=True):
            admission = self._prompts[slot]
            sampling: types_pb2.SamplingParams = admission.sampling  # type: ignore[assignment]  # opaque to the core
            start = max(first + 1, sampling.prompt_logprobs_start)
            end = min(first + count, admission.num_prompt_tokens - 1) + 1
            if not sampling.HasField("num_prompt_logprobs") or start >= end:
                continue
            tokens = [prompt_logprob(admission.token_ids[position], position) for position in range(start, end)]
            key, attempt = admission.stream_key, admission.attempt
            entry = worker_pb2.PromptLogprobs(stream_key=key, attempt=attempt, start=start, tokens=tokens)
            found.append((admission.router_id, entry))
        return found

    def _hello(self, incarnation: int) -> worker_pb2.Hello:
        spec = self._spec
        model = types_pb2.ModelInfo(
            name=spec.model,
            fingerprint=spec.fingerprint,
            vocab_size=self._model.vocab_size + 1,  # poison is a token that is never sampled
            max_model_len=spec.max_model_len,
            numerics="simulated",
            batch_invariant=not self._model.is_fickle,
        )
        return worker_pb2.Hello(
            incarnation=incarnation,
            process=self._process,
            model=model,
            block_size=spec.block_size,
            num_device_blocks=spec.num_device_blocks,
            num_host_blocks=spec.num_host_blocks,
            num_slots=spec.num_slots,
            max_step_tokens=spec.max_step_tokens,
            name=spec.name,
        )


def plan_from_wire(plan: worker_pb2.StepPlan) -> StepPlan:
    """The plan as the simulated replica takes it."""
    return StepPlan(
        incarnation=plan.incarnation,
        step=plan.step,
        released_slots=tuple(plan.released_slots),
        admissions=[_admission_from_wire(admission) for admission in plan.admissions],
        append_slots=tuple(plan.append_slots),
        append_counts=tuple(plan.append_counts),
        append_block_ids=tuple(plan.append_block_ids),
        row_slots=tuple(plan.row_slots),
        row_starts=tuple(plan.row_starts),
        row_counts=tuple(plan.row_counts),
        demote_device_ids=tuple(plan.demote_device_ids),
        demote_host_ids=tuple(plan.demote_host_ids),
        promote_host_ids=tuple(plan.promote_host_ids),
        promote_device_ids=tuple(plan.promote_device_ids),
    )


def _admission_from_wire(admission: worker_pb2.Admission) -> Admission:
    return Admission(
        slot=admission.slot,
        sequence_id=0,
        token_ids=tuple(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=tuple(admission.block_ids),
        sampling=admission.sampling,
        router_id=admission.router_id,
        stream_key=admission.stream_key,
        attempt=admission.attempt,
        adapter=admission.adapter,
    )


def result_to_wire(result: StepResult, duration_ns: int) -> worker_pb2.StepResult:
    """The result as a worker sends it."""
    reasons = [result.finishes[row].value if row in result.finishes else 0 for row in range(len(result.num_sampled))]
    return worker_pb2.StepResult(
        incarnation=result.incarnation,
        step=result.step,
        num_sampled=result.num_sampled,
        token_ids=result.token_ids,
        finish_reasons=reasons,  # type: ignore[arg-type]  # the two enums share their values
        undelivered_rows=result.undelivered_rows,
        duration_ns=duration_ns,
        copy_ns=result.copy_ns,
    )


def _add_delivery(batch: worker_pb2.TokenBatch, delivery: Delivery) -> None:
    tokens, position = delivery.token_ids, delivery.position
    sampled = [output_logprob(token_id, position + offset) for offset, token_id in enumerate(tokens)]
    batch.logprobs.append(worker_pb2.OutputLogprobs(index=len(batch.stream_keys), sampled=sampled))
    batch.stream_keys.append(delivery.stream_key)
    batch.attempts.append(delivery.attempt)
    batch.positions.append(position)
    batch.entry_positions.append(delivery.entry_position)
    batch.num_tokens.append(len(tokens))
    batch.token_ids.extend(tokens)
    batch.finish_reasons.append(delivery.finish or 0)  # type: ignore[arg-type]
    batch.final_token_ids.append(delivery.final_token_id or 0)


def _digest(plan: StepPlan) -> str:
    def short(items: Sequence[object]) -> str:
        return ",".join(map(str, items))

    admitted = short([f"{a.slot}<-{a.stream_key}.{a.attempt}" for a in plan.admissions])
    return f"-[{short(plan.released_slots)}] +[{admitted}] rows [{short(plan.row_slots)}] x [{short(plan.row_counts)}]"
