"""Which rank of its replica a process is, by the words of PyTorch's launchers, or of none.

torchrun, Slurm scripts and Kubernetes LeaderWorkerSets say it in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. Without them the worker is rank 0 and starts the others itself. Pure: reads a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.process import StartError
from octavo.sharding import MAX_RANKS


@dataclass(frozen=True)
class RankPlace:
    """One rank: its number, its number on its machine, and where rank 0 keeps the store at which all meet.

    `attempt` counts a launcher's restarts: what an earlier attempt left in the launcher's store is not looked at.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    master_address: str
    master_port: int
    # The launcher keeps the store, not rank 0.
    has_launchers_store: bool = False
    attempt: str = "0"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_local_ranks),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.has_launchers_store),
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
        }


def launched_place(environment: Mapping[str, str], tensor_parallel_size: int) -> RankPlace | None:
    """The place that a launcher gave this process; None where none did, or for a group of one.

    `tensor_parallel_size` is the option's; 1 leaves the size to the launcher. Raises StartError naming a variable that
    is missing, no number, out of range, or at odds with the option.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return None
    num_ranks = _number(environment, "WORLD_SIZE", range(1, MAX_RANKS + 1))
    if tensor_parallel_size not in (1, num_ranks):
        raise StartError(
            f"WORLD_SIZE is {num_ranks} and --tensor-parallel-size {tensor_parallel_size}: start as many ranks as the "
            "option says, or leave it out"
        )
    rank = _number(environment, "RANK", range(num_ranks))
    num_local_ranks = _number(environment, "LOCAL_WORLD_SIZE", range(1, num_ranks + 1), default=str(num_ranks))
    if not environment.get("MASTER_ADDR"):
        raise StartError(f"WORLD_SIZE is {num_ranks} and MASTER_ADDR is not set: set it to the machine of rank 0")
    return RankPlace(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=_number(environment, "LOCAL_RANK", range(num_local_ranks), default=str(rank % num_local_ranks)),
        num_local_ranks=num_local_ranks,
        master_address=environment["MASTER_ADDR"],
        master_port=_number(environment, "MASTER_PORT", range(1, 65536)),
        has_launchers_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environment: Mapping[str, str], name: str, allowed: range, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise StartError(f"WORLD_SIZE is {environment['WORLD_SIZE']} and {name} is not set: a launcher sets both")
    if not text.isdecimal() or int(text) not in allowed:
        raise StartError(f"{name} is {text!r}; it must be a number from {allowed.start} to {allowed.stop - 1}")
    return int(text)
