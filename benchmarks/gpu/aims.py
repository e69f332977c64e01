"""What the tables aim at, on an H200: printed beside what was measured, and decided by nobody.

Knows numbers alone. Attention is that of 32 query heads, 8 KV heads, head size 128, in bf16; steps are those of an 8B
shape over 1K of context. Each is (aim, stretch).
"""

from __future__ import annotations

CARD = "H200"
COPY_BYTES_PER_S = 4.3e12
MATMUL_FLOPS_PER_S = 790e12

# Microseconds, by (rows, context).
DECODE_US: dict[tuple[int, int], tuple[float, float]] = {
    (1, 1024): (11, 8),
    (1, 4096): (15, 11),
    (1, 32768): (52, 42),
    (16, 1024): (29, 24),
    (16, 4096): (83, 73),
    (16, 32768): (587, 548),
    (64, 1024): (83, 73),
    (64, 4096): (298, 275),
    (64, 32768): (2290, 2170),
    (256, 1024): (298, 275),
    (256, 4096): (1150, 1085),
}
# Share of the copy bandwidth with an e4m3 cache, from so many bytes of keys and values on.
FP8_DECODE_SHARE = (0.70, 0.85)
FP8_DECODE_BYTES = 500e6
# TFLOP/s, by (new tokens, context before them).
PREFILL_TFLOPS: dict[tuple[int, int], tuple[float, float]] = {
    (4096, 0): (330, 450),
    (16384, 0): (430, 550),
    (2048, 14336): (420, 550),
}
# Milliseconds of one row's step; of more rows, the share of the roofline.
STEP_MS_OF_ONE_ROW = (5.3, 4.6)
STEP_SHARE = (0.70, 0.80)
# Microseconds to sample 64 rows of 128K ids: one aim.
SAMPLING_US = {"greedy": 25.0, "Gumbel-max": 25.0, "top-k 50, top-p 0.9": 80.0}


def beside(aim: tuple[float, ...] | float | None, unit: str) -> str:
    """The end of a line: `[H200: 83 us, stretch 73]`; nothing where there is no aim."""
    if aim is None:
        return ""
    first, *stretch = aim if isinstance(aim, tuple) else (aim,)
    numbers = f"{100 * first:g} %" if unit == "%" else f"{first:g} {unit}"
    if stretch:
        numbers += f", stretch {100 * stretch[0] if unit == '%' else stretch[0]:g}"
    return f"  [{CARD}: {numbers}]"
