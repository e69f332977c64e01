"""Slow, obvious decoders of ggml's quantized blocks, one value at a time in Python's own arithmetic.

Each takes the bytes of one block and gives its values. Written from the layouts: where a value's bits lie,
and what scale and offset they are multiplied with.
"""

import struct
from collections.abc import Callable, Mapping

# IQ4_NL's sixteen levels.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _half(block: bytes, at: int) -> float:
    value: float = struct.unpack_from("<e", block, at)[0]
    return value


def _nibble(packed: bytes, index: int) -> int:
    """Value `index` of 32 in 16 bytes: the low halves hold the first sixteen."""
    return packed[index % 16] >> (4 * (index // 16)) & 15


def _bit(packed: bytes, index: int) -> int:
    return packed[index // 8] >> index % 8 & 1


def q5_0(block: bytes) -> list[float]:
    """Scale, 32 fifth bits, 32 nibbles; centred on 16."""
    scale, fifth, low = _half(block, 0), block[2:6], block[6:22]
    return [scale * ((_nibble(low, i) | _bit(fifth, i) << 4) - 16) for i in range(32)]


def q5_1(block: bytes) -> list[float]:
    """Scale, minimum, 32 fifth bits, 32 nibbles."""
    scale, minimum, fifth, low = _half(block, 0), _half(block, 2), block[4:8], block[8:24]
    return [scale * (_nibble(low, i) | _bit(fifth, i) << 4) + minimum for i in range(32)]


def iq4_nl(block: bytes) -> list[float]:
    """Scale and 32 nibbles that choose a level."""
    return [_half(block, 0) * _LEVELS[_nibble(block[2:18], i)] for i in range(32)]


def _pair(packed: bytes, index: int) -> int:
    """Two bits of 256 in 64 bytes: each run of 128 values in 32 bytes, 32 values to a pair of bits."""
    run, within = divmod(index, 128)
    return packed[32 * run + within % 32] >> 2 * (within // 32) & 3


def q2_k(block: bytes) -> list[float]:
    """16 bytes of a scale and a minimum in 4 bits each, 256 pairs of bits, and what multiplies both."""
    scales, low, scale, minimum = block[:16], block[16:80], _half(block, 80), _half(block, 82)
    return [scale * (scales[i // 16] & 15) * _pair(low, i) - minimum * (scales[i // 16] >> 4) for i in range(256)]


def q3_k(block: bytes) -> list[float]:
    """256 third bits, 256 pairs of bits, sixteen scales of 6 bits centred on 32, and what multiplies them."""
    third, low, packed, scale = block[:32], block[32:96], block[96:108], _half(block, 108)
    values = []
    for i in range(256):
        high = third[i % 32] >> i // 32 & 1
        group = i // 16
        low_bits = packed[group % 8] >> 4 * (group // 8) & 15
        high_bits = packed[8 + group % 4] >> 2 * (group // 4) & 3
        values.append(scale * ((low_bits | high_bits << 4) - 32) * (_pair(low, i) - (0 if high else 4)))
    return values


def _scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    """Group's of eight, 6 bits each in 12 bytes: four whole, the other four in nibbles and spare bits."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    return (
        packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
        packed[group + 4] >> 4 | packed[group] >> 6 << 4,
    )


def _k_nibble(packed: bytes, index: int) -> int:
    """Four bits of 256 in 128 bytes: each run of 64 values in 32 bytes, low halves first."""
    run, within = divmod(index, 64)
    return packed[32 * run + within % 32] >> 4 * (within // 32) & 15


def q4_k(block: bytes) -> list[float]:
    """What multiplies scales and minima, eight of each, 256 nibbles."""
    scale, minimum, packed, low = _half(block, 0), _half(block, 2), block[4:16], block[16:144]
    values = []
    for i in range(256):
        group_scale, group_minimum = _scale_and_minimum(packed, i // 32)
        values.append(scale * group_scale * _k_nibble(low, i) - minimum * group_minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    """As Q4_K, with 256 fifth bits: bit n of 32 bytes belongs to the n-th group of 32."""
    scale, minimum, packed = _half(block, 0), _half(block, 2), block[4:16]
    fifth, low = block[16:48], block[48:176]
    values = []
    for i in range(256):
        group_scale, group_minimum = _scale_and_minimum(packed, i // 32)
        code = _k_nibble(low, i) | (fifth[i % 32] >> i // 32 & 1) << 4
        values.append(scale * group_scale * code - minimum * group_minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    """256 nibbles (runs of 128 in 64 bytes), 256 pairs of bits, sixteen signed scales, what multiplies them."""
    low, high, scales, scale = block[:128], block[128:192], block[192:208], _half(block, 208)
    values = []
    for i in range(256):
        run, within = divmod(i, 128)
        nibble = low[64 * run + within % 64] >> 4 * (within // 64) & 15
        group_scale = struct.unpack_from("<b", scales, i // 16)[0]
        values.append(scale * group_scale * ((nibble | _pair(high, i) << 4) - 32))
    return values


DECODERS: Mapping[str, Callable[[bytes], list[float]]] = {
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "IQ4_NL": iq4_nl,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}

# Where the half-precision numbers of a block lie.
HALVES: Mapping[str, tuple[int, ...]] = {
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
