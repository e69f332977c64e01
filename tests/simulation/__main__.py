"""Runs seeds by hand: `python -m tests.simulation SEED` tells the whole story of one, `... FIRST LAST` runs many."""

from __future__ import annotations

import logging
import sys
from collections import Counter

from tests.simulation.world import SeedFailed, run_seed


def main(arguments: list[str]) -> int:
    """Exit status 1 when a seed failed."""
    logging.disable(logging.WARNING)
    if len(arguments) == 1:
        try:
            print(run_seed(int(arguments[0]), keeps_all=True))
        except SeedFailed as failed:
            print(failed)
            return 1
        return 0
    failures: list[int] = []
    ends: Counter[str] = Counter()
    for seed in range(int(arguments[0]), int(arguments[1])):
        try:
            ends += run_seed(seed).ends
        except SeedFailed as failed:
            failures.append(seed)
            print("\n".join(str(failed).splitlines()[:2]))
    print(dict(ends), f"{len(failures)} seeds failed: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
