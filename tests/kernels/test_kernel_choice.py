"""Which backend is opened, what is said when one cannot be, and life beside Hugging Face's package of our name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels.reference import ReferenceBackend
from kernels.select import open_backend


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)


def test_the_reference_by_name_with_its_threads() -> None:
    before = torch.get_num_threads()
    try:
        backend = open_backend("reference", 2)
        assert isinstance(backend, ReferenceBackend)
        assert torch.get_num_threads() == 2
        assert open_backend("reference", None).info.name == "reference"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'cuda' is not one of auto, reference, cpu, triton"):
        open_backend("cuda", None)


def test_without_the_cpu_kernels_auto_warns_and_cpu_raises_with_the_reason() -> None:
    # A None entry is how Python itself is told that a module must not be imported.
    result = run_python(
        "import sys; sys.modules['kernels.cpu'] = None\n"
        "from kernels.select import open_backend\n"
        "print(open_backend('auto', 1).info.name)\n"
        "try: open_backend('cpu', 1)\n"
        "except RuntimeError as error: print(error)\n"
    )
    name, reason = result.stdout.splitlines()
    assert name == "reference"
    assert "kernels.cpu does not import" in reason
    assert "slow reference kernels" in result.stderr
    assert "kernels.cpu does not import" in result.stderr


def test_triton_kernels_without_a_gpu_are_refused_with_the_reason_and_not_imported() -> None:
    result = run_python(
        "import sys, torch\n"
        "from kernels.select import open_backend\n"
        "torch.cuda.is_available = lambda: False\n"
        "for name, device in (('triton', None), ('auto', 'cuda'), ('triton', 'cpu')):\n"
        "    try: open_backend(name, 1, device and torch.device(device))\n"
        "    except RuntimeError as error: print(error)\n"
        "assert 'kernels.triton' not in sys.modules\n"
    )
    reasons = result.stdout.splitlines()
    assert len(reasons) == 3
    assert all("the triton kernels cannot serve" in reason for reason in reasons)
    assert "not on cpu" in reasons[2]


def test_our_package_imports_nothing_of_itself() -> None:
    assert Path(kernels.__file__ or "").read_text() == ""
    run_python("import sys, kernels; assert not {'torch', 'numpy'} & set(sys.modules)")


def test_transformers_models_run_beside_our_package() -> None:
    result = run_python(
        "import kernels.api, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.models.qwen3 import modeling_qwen3\n"
        "config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,\n"
        "                     num_attention_heads=4, num_key_value_heads=2)\n"
        "with torch.no_grad():\n"
        "    print(tuple(LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape))\n"
        "print(kernels.__file__)\n"
    )
    shape, location = result.stdout.splitlines()[-2:]
    assert shape == "(1, 3, 64)"
    assert location == kernels.__file__
