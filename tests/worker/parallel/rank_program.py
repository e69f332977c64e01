"""One rank of a real process group, for tests: does the group's operations, and prints what it found as one JSON line.

`python -m tests.worker.parallel.rank_program`, with a launcher's variables.
"""

from __future__ import annotations

import json
import os
import time

import torch

from worker_svc.parallel.place import launched_place
from worker_svc.parallel.rendezvous import Rendezvous

NUM_ROWS, WIDTH = 9, 40
# For others to run ahead of the last rank, where nothing makes them wait for it.
HESITATION_S = 0.3


def input_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[NUM_ROWS, WIDTH] whose sum over ranks depends on the order of addition."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(NUM_ROWS, WIDTH, generator=generator) * 10.0 ** (3 * rank - 4)).to(dtype)


def main() -> None:
    place = launched_place(os.environ, 1)
    assert place is not None
    meeting = Rendezvous(place, 60.0, None)
    group = meeting.group(torch.device("cpu"), is_ordered=True)
    found: dict[str, object] = {}
    for dtype in (torch.float32, torch.bfloat16):
        own = input_of(place.rank, dtype)
        found[f"sum {dtype}"] = group.all_reduce(own.clone()).tolist()
        found[f"row sums {dtype}"] = [
            group.all_reduce(own[row : row + 1].clone())[0].tolist() for row in range(len(own))
        ]
        gathered = group.gather_columns(own[:, :3])
        found[f"columns {dtype}"] = None if gathered is None else gathered.tolist()
    found["told"] = group.broadcast(torch.tensor([place.rank + 7, place.rank])).tolist()
    found["minimum"] = group.minimum((place.rank, -place.rank, 5))
    if place.rank == place.num_ranks - 1:
        time.sleep(HESITATION_S)
        meeting._store.set("the last has come", "")
    found["nothing"] = group.minimum(())
    found["waited"] = meeting._store.check(["the last has come"])
    print(json.dumps(found), flush=True)
    # Rank 0 keeps the store: it is the last to go.
    group.minimum(())


if __name__ == "__main__":
    main()
