"""How sizes divide over ranks: every part has one owner, and what cannot be shared is refused with the numbers."""

from __future__ import annotations

import pytest

from octavo.sharding import DividedSizes, ShardingError, possible_sizes, share_of

SIZES = [
    DividedSizes(32, 8, 14336, 128256),
    DividedSizes(9, 3, 1536, 49152),
    DividedSizes(8, 1, 96, 257),
    DividedSizes(4, 4, 64, 11),
    DividedSizes(8, 2, 96, 1001),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_f56_everything_is_held_and_query_heads_meet_their_own_kv_heads(sizes: DividedSizes) -> None:
    per_kv = sizes.num_heads // sizes.num_kv_heads
    for num_ranks in possible_sizes(sizes):
        shares = [share_of(sizes, rank, num_ranks) for rank in range(num_ranks)]
        for whole, parts in (
            (sizes.num_heads, [share.heads for share in shares]),
            (sizes.intermediate_size, [share.intermediate for share in shares]),
            (sizes.num_embedding_rows, [share.embedding_rows for share in shares]),
        ):
            assert [index for part in parts for index in part] == list(range(whole))
        for share in shares:
            assert {head // per_kv for head in share.heads} == set(share.kv_heads)
            assert len(share.heads) % len(share.kv_heads) == 0
            assert len(share.embedding_rows) <= share.num_padded_rows == shares[0].num_padded_rows


def test_rank_0_never_has_more_heads_than_others() -> None:
    shares = [share_of(SIZES[1], rank, 2) for rank in range(2)]
    assert [len(share.heads) for share in shares] == [3, 6]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "message"),
    [
        (
            SIZES[0],
            12,
            "12 ranks cannot share 32 query heads .* on 8 KV heads .*; this model can be shared by 1, 2, 4, 7",
        ),
        (SIZES[4], 3, r"3 ranks cannot share 8 query heads .* on 2 KV heads .*; .* by 1, 2, 4, 8$"),
        (SIZES[4], 16, "16 ranks cannot share 8 query heads"),
        (SIZES[1], 4, "4 ranks cannot share 9 query heads"),
        (DividedSizes(8, 8, 100, 50), 3, "intermediate_size 100 is not a multiple of 3; .* 1, 2, 4, 5$"),
        (DividedSizes(8, 8, 64, 3), 4, "vocab_size 3 is less than 4"),
    ],
)
def test_f56_what_cannot_be_shared_is_refused(sizes: DividedSizes, num_ranks: int, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        share_of(sizes, 0, num_ranks)
