"""That the ranks of a replica were told the same and compute alike, before they begin to wait for each other in steps.

Knows what must be equal; a rank that loads its part of the model asks here.
"""

from __future__ import annotations

import hashlib

from octavo.internal.v1 import types_pb2
from octavo.process import StartError
from worker_svc.config import WorkerConfig
from worker_svc.parallel.group import TPGroup


def require_same_options(group: TPGroup, config: WorkerConfig) -> None:
    """That all ranks make steps of the same shapes, and add up in the same way: before the first sum.

    Raises StartError, on every rank alike, with what this one was told.
    """
    _require_equal(
        group,
        f"--block-size {config.block_size}, --max-num-seqs {config.max_num_seqs}, "
        f"--max-num-batched-tokens {config.max_num_batched_tokens}, --swap-space {config.swap_space:g}, "
        f"--enforce-eager {config.enforce_eager}, --batch-invariant {config.batch_invariant}",
    )


def require_same_numerics(group: TPGroup, info: types_pb2.ModelInfo) -> None:
    """That all ranks compute alike: one answer comes from all of them. Raises StartError as `require_same_options`."""
    _require_equal(group, f"numerics {info.numerics}, --max-model-len {info.max_model_len}")


def _require_equal(group: TPGroup, facts: str) -> None:
    number = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:7], "big")
    # The least of a number and of its negative are that number on all ranks only if all have the same.
    if group.minimum((number, -number)) != (number, -number):
        raise StartError(
            f"the {group.size} ranks do not agree; start all with the same options, on the same model, CPU type and "
            f"packages. Rank {group.rank} has {facts}"
        )
