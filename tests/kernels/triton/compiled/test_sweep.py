"""What the sweep writes into the tables of configurations."""

from __future__ import annotations

import pytest

from kernels.triton import configs
from kernels.triton.configs import DecodeConfig, PrefillConfig, attention_configs
from tools.sweep_kernels import CONFIGS, written


def tables(text: str) -> dict[str, object]:
    names: dict[str, object] = {"__name__": configs.__name__}
    exec(compile(text, "configs", "exec"), names)
    return names


def test_an_entry_is_replaced_or_added_in_order() -> None:
    text = CONFIGS.read_text()
    changed = written(text, "DECODE", (90, 128, 2), DecodeConfig(16, 128, 2, 4, 6))
    changed = written(changed, "PREFILL", (90, 96, 1), PrefillConfig(64, 32, 4, 2))
    names = tables(changed)
    decode, prefill = names["DECODE"], names["PREFILL"]
    assert vars(decode[(90, 128, 2)]) == vars(DecodeConfig(16, 128, 2, 4, 6))  # type: ignore[index]
    assert vars(prefill[(90, 96, 1)]) == vars(PrefillConfig(64, 32, 4, 2))  # type: ignore[index]
    assert list(prefill) == sorted(prefill)  # type: ignore[call-overload]
    assert len(decode) == len(configs.DECODE)  # type: ignore[arg-type]
    # Written again as they are, all entries give the file back.
    for name in ("DECODE", "PREFILL", "INVARIANT_DECODE", "INVARIANT_PREFILL"):
        for key, config in getattr(configs, name).items():
            assert vars(tables(written(text, name, key, config))[name][key]) == vars(config)  # type: ignore[index]


def test_an_fp8_cache_may_have_entries_of_its_own() -> None:
    assert attention_configs(90, 128, 2, 1, False) == (configs.DECODE[90, 128, 2], configs.PREFILL[90, 128, 2])
    with pytest.raises(ValueError, match="needs sm_90"):
        attention_configs(80, 256, 2, 2, True)
