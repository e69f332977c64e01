"""What the compiler makes of the kernels for sm_90 and sm_80: the properties that their speed rests on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from covering import covering_cases

from kernels.api import AttentionSpec, KVCacheSpec, QKNorm, RopeTable
from kernels.triton import TritonBackend
from kernels.triton.configs import architecture
from kernels.triton.layer import DeviceShape
from tools import kernel_table
from tools.dry_compile import SHARED_MEMORY, Report, dry_run
from tools.kernel_table import BYTES_PER_CYCLE, Shape, attention_kernels

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# Asynchronous copies of 16 bytes past the first cache, sm_80's with a hint to the second.
ASYNC_128 = r"LDGSTS\.E\.BYPASS(\.LTC128B)?\.128"
# The most of memory time that issuing instructions may take: the rest hides latencies.
MOST_ISSUE = {BF16: 0.35, FP16: 0.35, FP8: 0.8}
# Tiles of more than 16 rows: wgmma's 64 of the invariant mode, and groups of more heads than that. The exponentials of
# all rows are computed, those of no head too.
MOST_ISSUE_OF_TALL_TILES = {BF16: 0.75, FP16: 0.75, FP8: 1.4}
# Dimensions that pad a head to a power of two are computed and not fetched: so much more.
PADDING = {80: 1.35, 96: 1.1}
DECODE = [
    Shape(90),
    Shape(90, cache_dtype=FP8),
    Shape(90, invariant=True),
    Shape(80),
]
PREFILL = [
    Shape(90, prefill=True),
    Shape(90, prefill=True, invariant=True),
    Shape(80, prefill=True),
]
# Blocks and groups take turns: they change loads and tiles, not what the tables hold.
TURNS = ((16, 4), (64, 1), (32, 8), (16, 5), (256, 2), (64, 16))


def tables() -> list[Shape]:
    """Every entry of the tables of configurations where it needs most registers: with a window and a soft cap."""
    kinds = product((80, 86, 90), (64, 80, 96, 128, 256), (BF16, FP8), (False, True), (False, True))
    found = []
    for number, (arch, head_dim, cache_dtype, invariant, prefill) in enumerate(kinds):
        # The first with fp8 conversions, and for the rest as its table is sm_86's.
        capability = 89 if arch == 86 and cache_dtype == FP8 else arch
        if capability >= 89 or cache_dtype != FP8:
            block_size, group = TURNS[number % len(TURNS)]
            shape = Shape(capability, head_dim, BF16, cache_dtype, block_size, invariant, prefill, 1000, 50.0, group)
            found += [shape] if is_known(shape) else []
    return found


def pairs() -> list[Shape]:
    """Every two values of all that a layer may be, once at least."""
    axes = {
        "capability": (80, 90),
        "head_dim": (64, 80, 96, 128, 256),
        "dtypes": ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8)),
        "block_size": (8, 16, 32, 64, 128),
        "hidden": ((None, None), (1000, None), (None, 50.0), (1000, 50.0)),
        "group": (1, 3, 4, 7, 8, 16, 32),
        "kernel": ((False, False), (False, True), (True, False), (True, True)),
    }
    found = []
    for case in covering_cases(axes):
        capability = 90 if case["dtypes"][1] == FP8 else case["capability"]
        sizes = case["head_dim"], *case["dtypes"], case["block_size"]
        shape = Shape(capability, *sizes, *case["kernel"], *case["hidden"], case["group"])
        found += [shape] if is_known(shape) else []
    return found


def is_known(shape: Shape) -> bool:
    """Whether there are tiles: see attention_configs of what it refuses."""
    return shape.head_dim <= 128 or shape.capability >= 90 or not shape.invariant


def floating_point(loop: list[str]) -> tuple[int, ...]:
    """How many fused, multiplying, adding and exponential instructions a loop has."""
    return tuple(sum(name in line for line in loop) for name in ("FFMA", "FMUL", "FADD", "MUFU.EX2"))


def assert_no_spills(reports: dict[str, Report], capability: int) -> None:
    for report in reports.values():
        assert report.spills == 0, f"{report.name} spills: {report.registers} registers"
        assert report.shared_bytes <= SHARED_MEMORY[capability]


def assert_decode_streams(shape: Shape) -> None:
    reports = attention_kernels(shape)
    assert_no_spills(reports, shape.capability)
    decode = reports["_decode_partitions"]
    buffers = decode.matrix_buffers()
    assert len(buffers) >= 1
    assert min(depth for depth, _, _ in buffers) >= 2, "keys and values of the next tile must be in flight"
    assert decode.count(ASYNC_128) > 0
    # The compiler lays fp8 values out for their conversion in pieces of 8 bytes.
    narrower = r"LDGSTS\.E\.64" if shape.cache_dtype == FP8 else "none"
    assert decode.count("LDGSTS") == decode.count(ASYNC_128) + decode.count(narrower)
    assert_issues_in_time(shape, decode)


def assert_issues_in_time(shape: Shape, decode: Report) -> None:
    """Where the bound is one: an H200's bandwidth, and no smaller GPU's."""
    if shape.capability in (86, 89):
        return
    issue = decode.issue_share(shape.loop_bytes, BYTES_PER_CYCLE)
    if shape.invariant and shape.capability < 90 and shape.group > 16:
        # They take prefill's tile of 128 rows: bound by arithmetic.
        return
    is_tall = shape.group > 16 or (shape.invariant and shape.capability >= 90)
    most = (MOST_ISSUE_OF_TALL_TILES if is_tall else MOST_ISSUE)[shape.cache_dtype]
    assert issue <= most * PADDING.get(shape.head_dim, 1.0), f"{issue:.2f} of the time to fetch"


def assert_prefill_multiplies(shape: Shape) -> None:
    reports = attention_kernels(shape)
    assert_no_spills(reports, shape.capability)
    prefill = reports["_prefill"]
    assert prefill.count("HGMMA") > 0 if shape.capability >= 90 else prefill.count("HMMA") > 0
    assert prefill.count(ASYNC_128) > 0
    # Tiles with a mask and without: one arithmetic.
    assert len({floating_point(loop) for loop in prefill.product_loops}) == 1
    assert len(prefill.product_loops) == (1 if shape.invariant else 2 if shape.window is None else 3)


@pytest.mark.parametrize("shape", DECODE, ids=kernel_table.describe)
def test_decode_keeps_two_tiles_in_flight(shape: Shape) -> None:
    assert_decode_streams(shape)


@pytest.mark.parametrize("shape", PREFILL, ids=kernel_table.describe)
def test_prefill_feeds_the_matrix_units(shape: Shape) -> None:
    assert_prefill_multiplies(shape)


def assert_one_arithmetic(shape: Shape) -> None:
    """Decode and prefill of the invariant mode: the same matrix instruction, warps along rows, tile and operations."""
    decode = attention_kernels(replace(shape, invariant=True))["_decode_partitions"]
    prefill = attention_kernels(replace(shape, invariant=True, prefill=True))["_prefill"]
    for report in (decode, prefill):
        assert {warps.split(", ")[1] for warps, _ in report.matrix_layouts()} == {"1"}
    # A part of the output has fewer columns; the scores' product is the same, and so is the exponentials' number.
    assert {shape for _, shape in prefill.matrix_layouts()} & {shape for _, shape in decode.matrix_layouts()}
    pairs = [[floating_point(loop) for loop in report.product_loops] for report in (decode, prefill)]
    assert [len(loops) for loops in pairs] == [1, 1]
    (fused, _, added, exponentials), (fused_too, _, added_too, exponentials_too) = pairs[0][0], pairs[1][0]
    assert (fused, added, exponentials) == (fused_too, added_too, exponentials_too)


def test_invariant_decode_and_prefill_have_one_arithmetic() -> None:
    assert_one_arithmetic(Shape(90))


@pytest.mark.parametrize("capability", [90, 80, pytest.param(89, marks=pytest.mark.slow)])
def test_dense_kernels_do_not_spill(capability: int) -> None:
    shape = DeviceShape(architecture(capability), 132)
    backend = TritonBackend(torch.device("cpu"), batch_invariant=True, shape=shape)
    x, weight = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4096, 4096, dtype=BF16)
    many = torch.zeros(512, 4096, dtype=BF16)
    packed = backend.pack_linear(weight, None)
    cache = backend.allocate_kv_cache(KVCacheSpec(2, 4, 16, 8, 128, BF16))
    with dry_run(capability) as compiled:
        backend.linear(x, packed)
        backend.linear(many, packed)
        backend.add_rms_norm(x, x.clone(), weight[0], 1e-5)
        backend.silu_mul(x)
        backend.gelu_mul(x)
        backend.soft_cap(x, 30.0)
        backend.copy_blocks(cache, [0, 1], cache, [2, 3])
    reports = [Report(kernel) for kernel in compiled]
    assert [report.name for report in reports] == [
        "_matmul", "_matmul", "_rms_norm", "_gated", "_gated", "_soft_cap", "_copy_blocks",
    ]  # fmt: skip
    for report in reports:
        assert_no_spills({report.name: report}, capability)
    for report in reports[:2]:
        assert report.count(ASYNC_128) >= 8
        assert min(depth for depth, _, _ in report.matrix_buffers()) >= 2
        assert (report.count("HGMMA") > 0) == (capability >= 90)


def test_nan_outlives_the_saturation_of_an_fp8_cache() -> None:
    """The plain instructions give the other operand for NaN: 448, which nobody would notice. No other test has 72."""
    kernels = attention_kernels(Shape(90, head_dim=72, cache_dtype=FP8))
    assert kernels["_rope_write_kv"].count(r"FMNMX") == kernels["_rope_write_kv"].count(r"FMNMX3?\.NAN") > 0


def test_partial_results_are_fetched_several_at_a_time() -> None:
    """One after the other they would cost a long context their latency a hundred times."""
    fold = attention_kernels(Shape(90, head_dim=88))["_fold_partitions"]
    assert max(sum("LDG.E.128" in line for line in loop) for loop in fold.loops) >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "rotated"), [(128, 128), (256, 256), (256, 128), (80, 32)])
@pytest.mark.parametrize(("capability", "cache_dtype"), [(80, BF16), (90, BF16), (89, FP8), (90, FP8)])
def test_rotation_with_norms_does_not_spill(
    capability: int, cache_dtype: torch.dtype, head_dim: int, rotated: int
) -> None:
    backend = TritonBackend(torch.device("cpu"), shape=DeviceShape(architecture(capability), 132))
    cache = backend.allocate_kv_cache(KVCacheSpec(1, 32, 16, 8, head_dim, cache_dtype))
    table, weight = torch.zeros(512, rotated // 2), torch.ones(head_dim, dtype=BF16)
    qkv = torch.zeros(2, 48 * head_dim, dtype=BF16)
    with dry_run(capability) as compiled:
        plan = backend.plan_attention(kernel_table.ragged_batch((1, 1), 300, 16), cache)
        backend.rope_write_kv(qkv, cache, 0, plan, RopeTable(table, table), QKNorm(weight, weight, 1e-5))
    reports = {report.name: report for report in map(Report, compiled)}
    assert "_rope_write_kv" in reports
    assert_no_spills(reports, capability)


@pytest.mark.parametrize("prefill", [False, True])
def test_fp32_stays_in_registers(prefill: bool) -> None:
    assert_no_spills(attention_kernels(Shape(90, dtype=FP32, cache_dtype=FP32, prefill=prefill)), 90)


def test_nothing_is_compiled_for_another_batch() -> None:
    # Scratch for six partitions: the larger of the batches take rounds.
    shape = DeviceShape(90, 132, scratch_bytes=6 * 2 * 66 * 4)
    backend = TritonBackend(torch.device("cpu"), batch_invariant=True, shape=shape)
    spec = KVCacheSpec(1, 64, 16, 2, 64, BF16)
    cache = backend.allocate_kv_cache(spec)
    table, norm = torch.zeros(512, 32), torch.zeros(384, dtype=BF16)
    packed = backend.pack_linear(torch.zeros(384, 384, dtype=BF16), None)

    def step(counts: tuple[int, ...], context: int) -> None:
        batch = kernel_table.ragged_batch(counts, context, spec.block_size)
        qkv = torch.zeros(batch.num_tokens, 384, dtype=BF16)
        plan = backend.plan_attention(batch, cache)
        backend.rope_write_kv(qkv, cache, 0, plan, RopeTable(table, table), None)
        backend.attention(qkv, cache, 0, plan, AttentionSpec(2, 0.125))
        backend.linear(backend.silu_mul(torch.cat((qkv, qkv), 1)), packed)
        backend.rms_norm(qkv, norm, 1e-5)
        backend.copy_blocks(cache, list(range(len(counts))), cache, list(range(32, 32 + len(counts))))

    with dry_run(90) as compiled:
        step((1, 5), 100)
    # Kernels of other sizes than any other test's; what those share with them may be there already.
    assert {"_rope_write_kv", "_decode_partitions", "_prefill"} <= {kernel.metadata.name for kernel in compiled}
    with dry_run(90) as compiled:
        for counts in ((1,), (1, 1), (16,), (7, 1, 1), (1,) * 16, (1,) * 17, (32, 1)):
            for context in (32, 33, 256, 300):
                step(counts, context)
    assert [kernel.metadata.name for kernel in compiled] == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*tables(), *pairs()], ids=str)
def test_every_configuration(shape: Shape) -> None:
    if shape.prefill:
        assert_prefill_multiplies(shape)
    else:
        assert_decode_streams(shape)


# Of the last, decode takes prefill's rows: its own warps would stand along the positions.
ARITHMETICS = (
    *(Shape(90, head_dim) for head_dim in (64, 80, 96, 256)),
    *(Shape(90, head_dim, cache_dtype=FP8) for head_dim in (64, 256)),
    *(Shape(80, head_dim) for head_dim in (64, 80, 128)),
    *(Shape(80, head_dim, group=32) for head_dim in (64, 128)),
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ARITHMETICS, ids=str)
def test_one_arithmetic_everywhere(shape: Shape) -> None:
    assert_one_arithmetic(shape)


@pytest.mark.slow
def test_the_table_in_the_documentation_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_table", "--check"])
    assert kernel_table.main() == 0
