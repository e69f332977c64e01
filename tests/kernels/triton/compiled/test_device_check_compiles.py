"""The device check's dry run compiles what the real one launches: the worker's steps and quantized products too."""

from __future__ import annotations

import pytest

from benchmarks.gpu.compiling import compile_for


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_dry_run_compiles_all_that_the_real_one_launches(capability: int) -> None:
    lines: list[str] = []
    found = compile_for(capability, lines.append)
    names = found["names"]
    assert isinstance(names, list)
    assert {
        "_rope_write_kv", "_scaled_product", "_grouped_product", "_copy_blocks", "scan_parts", "draw_truncated",
        "choose_of_parts", "_adjust", "_forbid", "_scan_logprobs", "_matmul",
    } <= set(names)  # fmt: skip
    assert [line.split(":")[0] for line in lines] == [f"sm_{capability}"] * 2
