"""Checks of tensor parallelism: whether so many ranks have something to run on and can share the model. Pure functions.

They judge nothing where one process holds the model.
"""

from __future__ import annotations

from octavo.checks.types import Check, Facts, Finding, Severity
from octavo.sharding import ShardingError, possible_sizes, share_of

_FLAG = "--tensor-parallel-size"


def ranks_have_devices(facts: Facts) -> Finding | None:
    if facts.model is None or facts.model.num_ranks == 1 or (facts.cards is not None and facts.cards.on_gpu):
        return None
    num_ranks, num_cpus = facts.model.num_local_ranks, facts.machine.num_cpus
    measured = f"{num_ranks} of {facts.model.num_ranks} ranks on this machine ({_FLAG})"
    limit = f"a CPU core for each; {num_cpus} can be used here"
    if num_ranks <= num_cpus:
        return Finding("ranks-devices", Severity.OK, measured, limit)
    remedy = f"Use {_FLAG} {num_cpus} or less, or give this process more cores"
    return Finding("ranks-devices", Severity.FAILURE, measured, limit, remedy)


def ranks_share_model(facts: Facts) -> Finding | None:
    if facts.model is None or facts.model.num_ranks == 1 or facts.model.divided_sizes is None:
        return None
    sizes, num_ranks = facts.model.divided_sizes, facts.model.num_ranks
    limit = "every rank must get heads, MLP channels and vocabulary of its own"
    try:
        shares = [share_of(sizes, rank, num_ranks) for rank in range(num_ranks)]
    except ShardingError as error:
        choices = ", ".join(map(str, possible_sizes(sizes)))
        return Finding("ranks-sizes", Severity.FAILURE, str(error), limit, f"Use {_FLAG} with one of {choices}")
    heads = sorted({len(share.heads) for share in shares})
    if len(heads) == 1:
        return Finding("ranks-sizes", Severity.OK, f"{num_ranks} ranks of {heads[0]} query heads", limit)
    return Finding(
        "ranks-sizes",
        Severity.WARNING,
        f"{num_ranks} ranks of {heads[0]} to {heads[-1]} query heads: {sizes.num_kv_heads} KV heads, divided unevenly",
        limit,
        f"It serves; the ranks with more heads set the pace. {_even(sizes.num_kv_heads)}",
    )


def _even(num_kv_heads: int) -> str:
    even = [number for number in range(2, num_kv_heads + 1) if num_kv_heads % number == 0]
    return f"Ranks would be equal with {_FLAG} {' or '.join(map(str, even))}"


CHECKS = (
    Check(
        "ranks-devices",
        "Every rank of a tensor-parallel replica has a device",
        "A rank on CPUs needs a core of its own, for ranks wait for each other in every layer. Lower "
        "`--tensor-parallel-size`, or let the process use more cores (`taskset`, a container's CPU limit).",
        ranks_have_devices,
        processes=("worker",),
    ),
    Check(
        "ranks-sizes",
        "The ranks can share the model",
        "KV heads are divided over the ranks, or each is copied to a whole number of ranks that divide its query "
        "heads; `intermediate_size` must be a multiple of the number of ranks. The finding names the numbers that fit.",
        ranks_share_model,
        processes=("worker",),
    ),
)
