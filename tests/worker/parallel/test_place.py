"""What a launcher's variables say, and what is refused of them by name."""

from __future__ import annotations

import pytest

from octavo.process import StartError
from worker_svc.config import WorkerConfig
from worker_svc.parallel.place import RankPlace, launched_place
from worker_svc.parallel.replica import SoleReplica, replica_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchruns_words_are_understood() -> None:
    place = launched_place(TORCHRUN, 1)
    assert place == RankPlace(5, 8, 1, 4, "node0", 29500, has_launchers_store=True, attempt="2")
    assert launched_place(TORCHRUN, 8) == place
    assert place is not None
    assert launched_place(place.environment, 1) == place


def test_ranks_started_here_heed_no_outer_launcher() -> None:
    own = RankPlace(1, 2, 1, 2, "127.0.0.1", 1234)
    assert launched_place({**TORCHRUN, **own.environment}, 2) == own


def test_without_local_numbers_all_ranks_are_on_one_machine() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert launched_place(variables, 1) == RankPlace(1, 2, 1, 2, "127.0.0.1", 1234)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_group_of_one_is_no_group(variables: dict[str, str]) -> None:
    assert launched_place(variables, 1) is None
    assert isinstance(replica_of(WorkerConfig(), variables), SoleReplica)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "8"}, "RANK is '8'; it must be a number from 0 to 7"),
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is '4'; it must be a number from 0 to 3"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
    ],
)
def test_a_variable_at_fault_is_named(changes: dict[str, str | None], message: str) -> None:
    variables = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(StartError, match=message):
        launched_place(variables, 1)


def test_option_and_launcher_must_agree() -> None:
    with pytest.raises(StartError, match="WORLD_SIZE is 8 and --tensor-parallel-size 4"):
        launched_place(TORCHRUN, 4)
