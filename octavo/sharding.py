"""How a model's sizes divide over the ranks of a tensor-parallel group: pure arithmetic.

The checks refuse by it before anything is loaded, memory is predicted by it, and the worker shards its weights by it.
Knows numbers alone: no file, no tensor, no process.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_RANKS = 64


class ShardingError(ValueError):
    """Sizes that so many ranks cannot share; the message names them and the numbers of ranks that can."""


@dataclass(frozen=True)
class DividedSizes:
    """The sizes of a decoder that are divided; all others every rank has whole."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_embedding_rows: int


@dataclass(frozen=True)
class Share:
    """One rank's part of each divided size. Query heads are those that attend to its KV heads.

    A KV head may be held by several ranks, each with some of its query heads; everything else has one owner.
    """

    heads: range
    kv_heads: range
    intermediate: range
    # Rows of the embedding, and so columns of the output head, that exist.
    embedding_rows: range
    # Rows with the padding that makes all ranks' tables equally long.
    num_padded_rows: int

    @property
    def sizes(self) -> DividedSizes:
        """What the rank holds, counted."""
        return DividedSizes(len(self.heads), len(self.kv_heads), len(self.intermediate), self.num_padded_rows)


def share_of(sizes: DividedSizes, rank: int, num_ranks: int) -> Share:
    """The part of `rank`. Raises ShardingError where so many ranks cannot share the sizes.

    KV heads are divided with their query heads, and where they do not divide evenly the last ranks have one more: rank
    0 samples beside. More ranks than KV heads each hold one of them and divide its query heads evenly.
    """
    if fault := _fault(sizes, num_ranks):
        choices = ", ".join(map(str, possible_sizes(sizes)))
        raise ShardingError(f"{fault}; this model can be shared by {choices}")
    heads_per_kv = sizes.num_heads // sizes.num_kv_heads
    if sizes.num_kv_heads >= num_ranks:
        kv_heads = _cut(sizes.num_kv_heads, rank, num_ranks)
        heads = range(kv_heads.start * heads_per_kv, kv_heads.stop * heads_per_kv)
    else:
        heads = _cut(sizes.num_heads, rank, num_ranks)
        kv_head = heads.start // heads_per_kv
        kv_heads = range(kv_head, kv_head + 1)
    num_rows = -(-sizes.num_embedding_rows // num_ranks)
    first = min(rank * num_rows, sizes.num_embedding_rows)
    return Share(
        heads=heads,
        kv_heads=kv_heads,
        intermediate=_cut(sizes.intermediate_size, rank, num_ranks),
        embedding_rows=range(first, min(first + num_rows, sizes.num_embedding_rows)),
        num_padded_rows=num_rows,
    )


def possible_sizes(sizes: DividedSizes) -> tuple[int, ...]:
    """The numbers of ranks that can share these sizes, ascending; 1 is always among them."""
    return tuple(number for number in range(1, MAX_RANKS + 1) if not _fault(sizes, number))


def _fault(sizes: DividedSizes, num_ranks: int) -> str:
    """Why so many ranks cannot share the sizes; empty where they can."""
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    # Of the ranks that hold one KV head each has a part of its query heads.
    if kv_heads < num_ranks and (num_ranks % kv_heads or heads % num_ranks):
        return (
            f"{num_ranks} ranks cannot share {heads} query heads (num_attention_heads) on {kv_heads} KV heads "
            "(num_key_value_heads)"
        )
    if sizes.intermediate_size % num_ranks:
        return f"intermediate_size {sizes.intermediate_size} is not a multiple of {num_ranks}"
    if sizes.num_embedding_rows < num_ranks:
        return f"vocab_size {sizes.num_embedding_rows} is less than {num_ranks}"
    return ""


def _cut(size: int, rank: int, num_ranks: int) -> range:
    return range(rank * size // num_ranks, (rank + 1) * size // num_ranks)
