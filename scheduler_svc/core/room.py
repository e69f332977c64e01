"""The waiting room: the queues of all models, those that follow a leader, and the bounds on all of them.

Knows sequences, and leaders as sequences; must not know replicas or blocks. A follower waits beside the queue until its
leader has computed what they share, or leaves; it counts as waiting.
"""

from __future__ import annotations

from scheduler_svc.core.group_places import GroupPlaces
from scheduler_svc.core.limits import CoreLimits, SchedulingPolicy
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.queue import AnyQueue, FairQueue, WaitingQueue
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.statistics import TenantStatistics
from scheduler_svc.core.types import RefusalReason, Refused, Request


class WaitingRoom:
    """Everyone that waits, and room for more."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self.queues: dict[str, AnyQueue] = {}
        self.paces: dict[str, Pace] = {}
        self.followers: dict[Sequence, dict[Sequence, int]] = {}
        """Leader -> followers, with the number of full blocks of the leader that each waits for."""
        self.leaders: dict[Sequence, Sequence] = {}
        """Follower -> its leader."""
        self.group_places = GroupPlaces()
        self.tenants: dict[str, list[int]] = {}
        """Tenant -> sequences and known tokens that wait; absent if none."""
        self.num_waiting = 0
        self.num_tokens = 0
        """Known tokens of all that wait."""

    def queue(self, model: str) -> AnyQueue:
        """The queue of a model."""
        queue = self.queues.get(model)
        if queue is None:
            fair = self._limits.policy is SchedulingPolicy.FAIR
            queue = self.queues[model] = FairQueue(self._limits.tenant_weights) if fair else WaitingQueue()
        return queue

    def pace(self, model: str) -> Pace:
        """How fast sequences of a model start."""
        pace = self.paces.get(model)
        if pace is None:
            pace = self.paces[model] = Pace()
        return pace

    def lengths(self) -> dict[str, int]:
        """Waiting sequences by model."""
        lengths = {model: len(queue) for model, queue in self.queues.items()}
        for follower in self.leaders:
            lengths[follower.request.model] += 1
        return lengths

    def tenant_statistics(self) -> dict[str, TenantStatistics]:
        """What each tenant waits for and was served."""
        served: dict[str, int] = {}
        for queue in self.queues.values():
            for tenant, num_tokens in queue.served().items():
                served[tenant] = served.get(tenant, 0) + num_tokens
        statistics = {}
        for tenant in sorted({*self.tenants, *served}):
            num_waiting, num_tokens = self.tenants.get(tenant, (0, 0))
            statistics[tenant] = TenantStatistics(num_waiting, num_tokens, served.get(tenant, 0))
        return statistics

    # Room for more -----------------------------------------------------------------------------------------------

    def check(self, request: Request, now: int) -> None:
        """Raises Refused if a first attempt finds no room for itself and the rest of its group.

        Where nobody waits there is always room: what is larger than a limit would be told to try again for ever.
        """
        if request.attempt > 1 or self.group_places.has_for(request):
            return
        limits, tenant = self._limits, request.tenant
        kept, kept_own = self.group_places.total, self.group_places.of_tenant(tenant)
        num_waiting, num_tokens = self.num_waiting + kept.num_sequences, self.num_tokens + kept.num_tokens
        num_own, num_own_tokens = self.tenants.get(tenant, (0, 0))
        num_own, num_own_tokens = num_own + kept_own.num_sequences, num_own_tokens + kept_own.num_tokens
        whose = f" of tenant {tenant!r}"
        self._check_count(request, "", num_waiting, limits.max_waiting, now)
        self._check_count(request, whose, num_own, limits.max_waiting_per_tenant, now)
        self._check_tokens(request, "", num_tokens, limits.max_waiting_tokens, now)
        self._check_tokens(request, whose, num_own_tokens, limits.max_waiting_tokens_per_tenant, now)

    def _check_count(self, request: Request, whose: str, num_waiting: int, limit: int | None, now: int) -> None:
        num_over = num_waiting + request.group_size - limit if limit is not None else 0
        if num_waiting and num_over > 0:
            value = f"{num_waiting} (and {request.group_size} more)"
            retry_after_ns = self.pace(request.model).retry_after_ns(num_over, 0, now)
            raise _queue_full(f"number of waiting sequences{whose}", value, limit, retry_after_ns)

    def _check_tokens(self, request: Request, whose: str, num_tokens: int, limit: int | None, now: int) -> None:
        num_more = request.group_size * (len(request.prompt_token_ids) + len(request.prior_token_ids))
        if limit is not None and num_tokens and num_tokens + num_more > limit:
            value = f"{num_tokens} (and {num_more} more)"
            num_over = min(num_tokens, num_tokens + num_more - limit)
            retry_after_ns = self.pace(request.model).retry_after_ns(0, num_over, now)
            raise _queue_full(f"waiting tokens{whose}", value, limit, retry_after_ns)

    # Coming and going --------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait."""
        self.queue(sequence.request.model).add(sequence)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that waits; its tokens must not have changed since."""
        if sequence in self.leaders:
            self._unfollow(sequence)
        else:
            self.queue(sequence.request.model).remove(sequence)
        self._count(sequence, -1)

    def follow(self, sequence: Sequence, leader: Sequence, num_blocks: int) -> None:
        """A sequence leaves the queue until the leader has so many full blocks findable."""
        self.queue(sequence.request.model).remove(sequence)
        self.followers.setdefault(leader, {})[sequence] = num_blocks
        self.leaders[sequence] = leader

    def note_advance(self, leader: Sequence) -> list[Sequence]:
        """The leader made blocks findable: who waited for no more than those is back in the queue, and returned."""
        followers = self.followers.get(leader)
        if followers is None:
            return []
        ready = [other for other, num_blocks in followers.items() if num_blocks <= leader.num_hashed_blocks]
        for follower in ready:
            self._unfollow(follower)
            self.queue(follower.request.model).add(follower)
        return ready

    def dissolve(self, leader: Sequence) -> list[Sequence]:
        """The leader leads no longer: all its followers are back in the queue, and returned."""
        followers = self.followers.pop(leader, None)
        if followers is None:
            return []
        for follower in followers:
            del self.leaders[follower]
            self.queue(follower.request.model).add(follower)
        return list(followers)

    def _unfollow(self, follower: Sequence) -> None:
        leader = self.leaders.pop(follower)
        followers = self.followers[leader]
        del followers[follower]
        if not followers:
            del self.followers[leader]

    def _count(self, sequence: Sequence, sign: int) -> None:
        num_tokens = len(sequence.token_ids)
        self.num_waiting += sign
        self.num_tokens += sign * num_tokens
        own = self.tenants.setdefault(sequence.request.tenant, [0, 0])
        own[0] += sign
        own[1] += sign * num_tokens
        if own[0] == 0:
            del self.tenants[sequence.request.tenant]


def _queue_full(field: str, value: str, limit: int | None, retry_after_ns: int) -> Refused:
    remedy = f"try again in {retry_after_ns / 1e9:.3g} s"
    return Refused(RefusalReason.QUEUE_FULL, field, value, limit, remedy, retry_after_ns)
