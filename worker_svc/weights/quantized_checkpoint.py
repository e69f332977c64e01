"""A quantized checkpoint as the model asks for it: `X.weight` in float, whatever tensors stand for it in the files.

Knows the layouts of AWQ, GPTQ, fp8 and compressed-tensors. A module is quantized when its tensors say so, not by lists
of names. `load` dequantizes to fp32, by kernels.reference.quantized; `load_quantized` gives codes and scales, for
kernels that multiply them as they are. Scales of activations are not used: activations stay in the model's dtype.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kernels.quantized import GroupedWeight, QuantizedWeight, ScaledWeight
from kernels.reference.quantized import dequantize
from octavo.sources.quantization_config import QuantizationConfig
from worker_svc.weights.checkpoint import Checkpoint, TensorSpec, WeightsError

# Where AWQ puts eight neighbouring columns: the nibble from the lowest on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = [_AWQ_ORDER.index(column) for column in range(8)]
# What belongs to a quantized module, by the tensor that marks one.
_COMPANIONS = {
    "qweight": ("qzeros", "scales", "g_idx"),
    "weight_packed": ("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
    "weight": ("weight_scale", "weight_scale_inv", "weight_zero_point"),
}
# Of activations: nothing that a weight needs.
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "q_scale")
_EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)


class QuantizedCheckpoint:
    """Wraps the checkpoint of the files."""

    def __init__(self, stored: Checkpoint, config: QuantizationConfig) -> None:
        """Raises WeightsError for a module whose tensors are not all there or do not fit each other."""
        self._stored = stored
        self._config = config
        # The marking tensor of each quantized module.
        self._modules = _quantized_modules(stored.specs())
        self._specs = MappingProxyType(self._presented())

    @property
    def quantization(self) -> str:
        return self._config.method

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, the quantized ones as float matrices."""
        return self._specs

    def load(self, name: str) -> Tensor:
        """One tensor, dequantized to fp32 where it is quantized. Raises `WeightsError` for a name it does not hold."""
        weight = self.load_quantized(name)
        return self._stored.load(name) if weight is None else dequantize(weight)

    def load_quantized(self, name: str) -> QuantizedWeight | None:
        """A quantized matrix; None for a tensor that is plain."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module not in self._modules:
            return None
        try:
            return self._reader(module)(module)
        except (ValueError, RuntimeError) as error:
            raise WeightsError(f"{self._specs[name].file}: the quantized {module} cannot be read: {error}") from error

    def close(self) -> None:
        """Let go of the files."""
        self._stored.close()

    def _presented(self) -> dict[str, TensorSpec]:
        stored = self._stored.specs()
        found: dict[str, TensorSpec] = {}
        for name, spec in stored.items():
            module, _, kind = name.rpartition(".")
            if kind in _UNUSED:
                continue
            mark = self._modules.get(module)
            if mark == kind:
                found[f"{module}.weight"] = TensorSpec(self._shape(module, spec), torch.float32, spec.file)
            elif mark is None or kind not in _COMPANIONS[mark]:
                found[name] = spec
        return found

    def _shape(self, module: str, marked: TensorSpec) -> tuple[int, ...]:
        rows, columns = marked.shape
        mark, per_word = self._modules[module], 32 // (self._config.bits or 4)
        if mark == "qweight":
            return (8 * columns, rows) if self._config.method == "awq" else (columns, per_word * rows)
        if mark == "weight_packed":
            return tuple(self._companion(module, "weight_shape").tolist())
        return marked.shape

    def _reader(self, module: str) -> Callable[[str], QuantizedWeight]:
        mark = self._modules[module]
        if mark == "qweight":
            return self._awq if self._config.method == "awq" else self._gptq
        return self._packed if mark == "weight_packed" else self._scaled

    def _companion(self, module: str, kind: str) -> Tensor:
        name = f"{module}.{kind}"
        if name not in self._stored.specs():
            raise WeightsError(f"the quantized {module} has no tensor {name} in the checkpoint")
        return self._stored.load(name)

    def _optional(self, module: str, kind: str) -> Tensor | None:
        name = f"{module}.{kind}"
        return self._stored.load(name) if name in self._stored.specs() else None

    def _awq(self, module: str) -> GroupedWeight:
        """qweight [in, out / 8] int32 and qzeros [groups, out / 8], columns interleaved; scales [groups, out]."""
        codes = _unpacked(self._companion(module, "qweight"), 4)
        zeros = _unpacked(self._companion(module, "qzeros"), 4)
        scales = self._companion(module, "scales").float()
        codes, zeros = (x.view(len(x), -1, 8)[..., _AWQ_PLACES].flatten(1) for x in (codes, zeros))
        groups = _runs(len(codes), len(scales), self._config.group_size)
        return GroupedWeight(codes.t(), scales.t(), zeros.t(), groups, 4)

    def _gptq(self, module: str) -> GroupedWeight:
        """qweight [in / per word, out] int32, qzeros [groups, out / per word], scales [groups, out], g_idx [in]."""
        bits = self._config.bits or 4
        codes = _unpacked(self._companion(module, "qweight").t(), bits)
        zeros = _unpacked(self._companion(module, "qzeros"), bits) + self._config.zero_offset
        scales = self._companion(module, "scales").float()
        groups = self._optional(module, "g_idx")
        # With desc_act, g_idx gives the groups in the order of the inputs' weight.
        runs = _runs(codes.shape[1], len(scales), self._config.group_size)
        return GroupedWeight(codes, scales.t(), zeros.t(), runs if groups is None else groups.long(), bits)

    def _packed(self, module: str) -> GroupedWeight:
        """weight_packed [out, in / per word] int32; weight_scale [out, groups]; zero points packed along out."""
        words = self._companion(module, "weight_packed")
        rows, columns = (int(size) for size in self._companion(module, "weight_shape"))
        bits = 32 * words.shape[1] // columns if columns % 8 == 0 else 32 // -(-columns // words.shape[1])
        codes = _unpacked(words, bits)[:, :columns]
        scales = self._companion(module, "weight_scale").float()
        zeros = self._optional(module, "weight_zero_point")
        if zeros is None:
            levels = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
        else:
            levels = _unpacked(zeros.t(), bits).t()[:rows]
        groups = self._optional(module, "weight_g_idx")
        runs = _runs(columns, scales.shape[1], None)
        return GroupedWeight(codes, scales, levels, runs if groups is None else groups.long(), bits)

    def _scaled(self, module: str) -> ScaledWeight:
        """weight [out, in] e4m3 or int8 under weight_scale_inv or weight_scale, both of which multiply."""
        values = self._stored.load(f"{module}.weight")
        inverse = self._optional(module, "weight_scale_inv")
        scales = (self._companion(module, "weight_scale") if inverse is None else inverse).float()
        zeros = self._optional(module, "weight_zero_point")
        if zeros is not None and bool(zeros.any()):
            raise WeightsError(f"the quantized {module} has zero points of 8-bit numbers, which are not supported")
        rows, columns = values.shape
        if scales.numel() == 1:
            return ScaledWeight(values, scales.view(1, 1), (rows, columns))
        if self._config.block is None:
            return ScaledWeight(values, scales.view(-1, 1), (1, columns))
        return ScaledWeight(values, scales, self._config.block)


def _quantized_modules(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    marks: dict[str, str] = {}
    for name, spec in specs.items():
        module, _, kind = name.rpartition(".")
        if kind in ("qweight", "weight_packed") or (kind == "weight" and spec.dtype in _EIGHT_BITS):
            marks[module] = kind
    return marks


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[n, m] int32 to the [n, m * 32 / bits] uint8 numbers in them, the lowest bits first. 4 or 8 bits."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 0xF, octets >> 4), -1).flatten(1)


def _runs(num_inputs: int, num_groups: int, group_size: int | None) -> Tensor:
    """The group of each input where groups are runs of one length, the last of which may be cut short.

    Raises ValueError where the tensors have other groups than `group_size` makes, or, without one, no even ones.
    """
    size = group_size or num_inputs // max(1, num_groups)
    if size < 1 or -(-num_inputs // size) != num_groups or (group_size is None and num_inputs % num_groups):
        said = "" if group_size is None else f" of group_size {group_size}"
        raise ValueError(f"its scales are of {num_groups} groups{said}, which do not divide its {num_inputs} inputs")
    return torch.arange(num_inputs) // size
