"""Launch configurations of the kernels, as tables: nothing is tuned while serving.

Knows architectures, sizes and shared memory; launches nothing. The tables are what tools/sweep_kernels.py writes
when it has timed the candidates on a device. Key: (architecture, padded head_dim, bytes of an element in the
products).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """Tiles of `block_m` query heads by `tile` positions; programs that one multiprocessor holds at once."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of `block_m` pairs (token, query head) by `tile` positions, for one of `out_parts` parts of the output."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    out_parts: int = 1


@dataclass(frozen=True)
class MatmulConfig:
    """Tiles of the product that gives a row the same bits in any batch: block_k is the same for every row count."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Shared memory that one program may take, in bytes.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 90: 232_448}

DECODE: dict[tuple[int, int, int], DecodeConfig] = {
    (80, 64, 2): DecodeConfig(16, 64, 2, 3, 4),
    (80, 128, 2): DecodeConfig(16, 64, 4, 3, 2),
    (80, 256, 2): DecodeConfig(16, 32, 4, 3, 2),
    (86, 64, 2): DecodeConfig(16, 64, 4, 3, 2),
    (86, 128, 2): DecodeConfig(16, 32, 4, 3, 2),
    (86, 256, 2): DecodeConfig(16, 16, 4, 3, 2),
    (90, 64, 1): DecodeConfig(16, 32, 1, 3, 10),
    (90, 64, 2): DecodeConfig(16, 64, 2, 3, 6),
    (90, 80, 1): DecodeConfig(16, 32, 1, 3, 10),
    (90, 96, 1): DecodeConfig(16, 32, 1, 3, 10),
    (90, 128, 2): DecodeConfig(16, 64, 4, 3, 3),
    (90, 256, 2): DecodeConfig(16, 32, 4, 3, 3),
}

PREFILL: dict[tuple[int, int, int], PrefillConfig] = {
    (80, 64, 2): PrefillConfig(128, 64, 8, 3),
    (80, 128, 2): PrefillConfig(128, 32, 8, 3),
    (80, 256, 2): PrefillConfig(64, 32, 8, 3),
    (86, 64, 2): PrefillConfig(128, 64, 8, 3),
    (86, 128, 2): PrefillConfig(128, 32, 8, 3),
    (86, 256, 2): PrefillConfig(64, 16, 8, 3),
    (90, 64, 2): PrefillConfig(128, 64, 8, 3),
    (90, 128, 2): PrefillConfig(128, 64, 8, 3),
    (90, 256, 1): PrefillConfig(128, 16, 8, 3),
    (90, 256, 2): PrefillConfig(128, 32, 8, 3),
}

# Invariant attention wants one order of every sum in both kernels: the same tile of positions, and the same matrix
# instruction with all warps along the rows. Before sm_90 only equal tiles are sure to get that.
INVARIANT_DECODE: dict[tuple[int, int, int], DecodeConfig] = {
    (80, 64, 2): DecodeConfig(16, 64, 1, 3, 4),
    (80, 128, 2): DecodeConfig(16, 32, 1, 3, 4),
    (86, 64, 2): DecodeConfig(16, 64, 1, 3, 2),
    (86, 128, 2): DecodeConfig(16, 32, 1, 3, 2),
    (90, 64, 2): DecodeConfig(64, 64, 4, 3, 3),
    (90, 80, 2): DecodeConfig(64, 32, 4, 3, 2),
    (90, 96, 2): DecodeConfig(64, 32, 4, 3, 2),
    (90, 128, 2): DecodeConfig(64, 64, 4, 3, 2),
    (90, 256, 1): DecodeConfig(64, 16, 4, 3, 2),
    (90, 256, 2): DecodeConfig(64, 32, 4, 3, 1),
}

INVARIANT_PREFILL: dict[tuple[int, int, int], PrefillConfig] = {
    (80, 64, 2): PrefillConfig(128, 64, 8, 3),
    (80, 128, 2): PrefillConfig(128, 32, 8, 3, 2),
    (86, 64, 2): PrefillConfig(128, 64, 8, 3),
    (86, 128, 2): PrefillConfig(128, 32, 8, 3, 2),
    (90, 64, 2): PrefillConfig(128, 64, 8, 3),
    (90, 80, 2): PrefillConfig(128, 32, 8, 3),
    (90, 96, 2): PrefillConfig(128, 32, 8, 3),
    (90, 128, 2): PrefillConfig(128, 64, 8, 3),
    (90, 256, 1): PrefillConfig(128, 16, 8, 3, 2),
    (90, 256, 2): PrefillConfig(128, 32, 8, 3, 2),
}

# fp32 products are three of tf32 each; small tiles, and the same ones for both kernels.
WIDE_DECODE = DecodeConfig(16, 16, 4, 2, 2)
WIDE_PREFILL = PrefillConfig(16, 16, 4, 2)

# From this many rows on; the first entry is for fewer.
MATMUL: dict[tuple[int, int], tuple[tuple[int, MatmulConfig], ...]] = {
    (80, 2): ((0, MatmulConfig(64, 64, 64, 4, 4)), (256, MatmulConfig(128, 128, 64, 8, 3))),
    (86, 2): ((0, MatmulConfig(64, 64, 64, 4, 3)), (256, MatmulConfig(128, 64, 64, 4, 3))),
    (90, 2): ((0, MatmulConfig(64, 64, 64, 4, 4)), (256, MatmulConfig(128, 128, 64, 8, 4))),
}
WIDE_MATMUL = ((0, MatmulConfig(64, 64, 32, 4, 2)),)


def architecture(capability: int) -> int:
    """The table for a compute capability such as 89. Raises ValueError below the oldest."""
    known = [arch for arch in SHARED_MEMORY if arch <= capability]
    if not known:
        raise ValueError(f"compute capability {capability / 10} is too old for these kernels, they need 8.0")
    # Consumer Blackwell has the shared memory of consumer Ampere.
    return 86 if 120 <= capability < 130 else max(known)


def attention_configs(
    arch: int, head_dim: int, product_bytes: int, cache_bytes: int, invariant: bool
) -> tuple[DecodeConfig, PrefillConfig]:
    """The launch configurations of both attention kernels, by bytes of an element in products and in the cache.

    A head_dim without entries takes those of the next power of two, from 64 on, and an fp8 cache those of 16 bits.
    Raises ValueError where no tiles are known that give both kernels one order of sums.
    """
    if product_bytes == 4:
        return WIDE_DECODE, WIDE_PREFILL
    decode, prefill = (INVARIANT_DECODE, INVARIANT_PREFILL) if invariant else (DECODE, PREFILL)
    padded = max(64, 1 << (head_dim - 1).bit_length())
    keys = [(arch, dim, size) for size in sorted({cache_bytes, 2}) for dim in (head_dim, padded)]
    found = [[table[key] for key in keys if key in table] for table in (decode, prefill)]
    if not all(found):
        raise ValueError(f"batch-invariant attention of head_dim {head_dim} needs sm_90; this is sm_{arch}")
    return found[0][0], found[1][0]  # type: ignore[return-value]


def matmul_config(arch: int, element_bytes: int, num_rows: int) -> MatmulConfig:
    """The configuration of the invariant product for a number of rows."""
    entries = WIDE_MATMUL if element_bytes == 4 else MATMUL[arch, element_bytes]
    return [config for least, config in entries if least <= num_rows][-1]
