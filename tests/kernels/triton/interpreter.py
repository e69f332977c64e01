"""Triton's CPU interpreter, corrected, and a sanitizer for what runs in it.

`install()` before the kernels are imported and with TRITON_INTERPRET=1 in the environment. The stock interpreter
multiplies the raw bits of bf16, truncates where the GPU rounds to nearest even, loses the carry of fp8 and gives a
row of a product bits that depend on its place in the tile; none of it with an error. Corrected, products are exact
and rounded once.

`sanitizer()` checks every launch inside it: each address that a program loads or stores lies in a tensor passed to
that launch, and no address that one program stores is loaded or stored by another.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

_RAW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_FLOATS = (*_RAW, tl.float16, tl.float32, tl.float64)
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_CASTS = (
    "create_fp_ext",
    "create_fp_trunc",
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "cast_impl",
)


class SanitizerError(AssertionError):
    """A kernel reached outside its tensors, or two of its programs raced."""


def _widened(handle: Any) -> np.ndarray:
    """The numbers of a handle; what numpy has no type for becomes fp32."""
    kind = handle.dtype.scalar
    if kind not in _RAW:
        return handle.data
    bits = np.ascontiguousarray(handle.data)
    if kind == tl.bfloat16:
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(bits.view(np.uint8)).view(_RAW[kind]).float().numpy()


def _rounded(numbers: np.ndarray, kind: Any) -> np.ndarray:
    """Numbers as a handle of `kind` holds them: rounded to nearest even, fp8 saturated as the GPU's conversions do."""
    kind = kind.scalar
    if kind not in _RAW:
        return np.asarray(numbers).astype(stock._get_np_dtype(kind))
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    if kind == tl.bfloat16:
        return tensor.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    limited = torch.where(tensor.isnan(), tensor, tensor.clamp(-_LARGEST[kind], _LARGEST[kind]))
    return limited.to(_RAW[kind]).view(torch.uint8).numpy()


def _handle(numbers: np.ndarray, kind: Any) -> Any:
    return stock.TensorHandle(_rounded(numbers, kind), kind.scalar)


def _is_raw(*handles: Any) -> bool:
    return any(handle.dtype.scalar in _RAW for handle in handles)


def install() -> None:
    """Corrects the interpreter of this process, once."""
    builder = stock.InterpreterBuilder
    if getattr(builder, "_is_corrected", False):
        return
    builder._is_corrected = True
    _correct_arithmetic(builder)
    _correct_casts(builder)
    _observe(builder)
    _index_scalars()
    _patch_language_once()


def _correct_arithmetic(builder: Any) -> None:
    binary, unary, ternary = builder.binary_op, builder.unary_op, builder.ternary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not _is_raw(left, right):
            result = binary(self, left, right, op)
            # A comparison that keeps its operands' type is no mask any more once it is broadcast.
            return stock.TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result
        result = op(_widened(left), _widened(right))
        return stock.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _handle(result, left.dtype)

    def unary_op(self: Any, operand: Any, op: Any) -> Any:
        return _handle(op(_widened(operand)), operand.dtype) if _is_raw(operand) else unary(self, operand, op)

    def ternary_op(self: Any, first: Any, second: Any, third: Any, op: Any) -> Any:
        if op is np.where or not _is_raw(third):
            return ternary(self, first, second, third, op)
        return _handle(op(_widened(first), _widened(second), _widened(third)), third.dtype)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = [_widened(handle).astype(np.float64) for handle in (x, y, z)]
        return _handle(wide[0] * wide[1] + wide[2], z.dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        floats = np.issubdtype(d.data.dtype, np.floating)
        inner = np.float64 if floats else d.data.dtype
        product = np.matmul(_widened(a).astype(inner), _widened(b).astype(inner))
        return stock.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.create_fma, builder.create_dot = create_fma, create_dot


def _correct_casts(builder: Any) -> None:
    between_floats = builder.create_fp_to_fp

    def cast(self: Any, source: Any, target: Any, *_: Any) -> Any:
        return _handle(_widened(source), target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        known = source.dtype.scalar in _FLOATS and target.scalar in _FLOATS
        return cast(self, source, target) if known else between_floats(self, source, target, rounding)

    for name in _CASTS:
        setattr(builder, name, cast)
    builder.create_fp_to_fp = create_fp_to_fp
    builder.get_bf16 = lambda self, value: _handle(np.array([value], np.float32), tl.bfloat16)


def _index_scalars() -> None:
    """`range(tensor)`: older interpreters hand numpy a vector of one where newer numpy wants a scalar."""
    patch = stock._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)

        def index(self: Any) -> int:
            return int(np.asarray(self.handle.data).reshape(-1)[0])

        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    stock._patch_lang_tensor = patched


def _patch_language_once() -> None:
    """The stock interpreter patches the whole language at every call of a function, which is most of what it does."""
    patch = stock._patch_lang
    done: list[Any] = []

    def patched(function: Any) -> Any:
        if not done:
            done.append(patch(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
        return types.SimpleNamespace(restore=lambda: None)

    stock._patch_lang = patched


def _observe(builder: Any) -> None:
    load, store = builder.create_masked_load, builder.create_masked_store
    call, arguments = stock.GridExecutor.__call__, stock.GridExecutor._init_args_hst

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if _launches is not None:
            _launches.access("load", pointers, mask, self.grid_idx)
        return load(self, pointers, mask, *rest)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if _launches is not None:
            _launches.access("store", pointers, mask, self.grid_idx)
        return store(self, pointers, value, mask, *rest)

    def init_arguments(self: Any, positional: Any, named: Any) -> Any:
        result = arguments(self, positional, named)
        if _launches is not None:
            _launches.begin(self.fn.__name__, [*result[0], *result[1].values()])
        return result

    def run(self: Any, *positional: Any, **named: Any) -> None:
        call(self, *positional, **named)
        if _launches is not None:
            _launches.end()

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    stock.GridExecutor._init_args_hst, stock.GridExecutor.__call__ = init_arguments, run
    # What runs on the CPU's own memory need not be copied back, all of its storage, onto itself.
    stock.GridExecutor._restore_args_dev = lambda self, *arguments: None


class Launches:
    """What the sanitizer saw: `num_addresses` over all launches, and the accesses of the one that runs."""

    def __init__(self) -> None:
        self.num_addresses = 0
        self._name = ""
        self._low = self._high = np.zeros(0, np.uint64)
        self._accesses: dict[str, list[tuple[np.ndarray, tuple[int, ...]]]] = {"load": [], "store": []}

    def begin(self, name: str, arguments: list[Any]) -> None:
        spans = sorted(_span(x) for x in arguments if isinstance(x, torch.Tensor) and x.numel())
        merged: list[list[int]] = []
        for low, high in spans:
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        self._name = name
        self._low, self._high = np.array(merged or [[0, 0]], np.uint64).T
        self._accesses = {"load": [], "store": []}

    def access(self, kind: str, pointers: Any, mask: Any, program: tuple[int, ...]) -> None:
        places, live = np.broadcast_arrays(pointers.data, mask.data)
        addresses = places[live.astype(bool)].astype(np.uint64)
        self.num_addresses += addresses.size
        if not addresses.size:
            return
        item = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        owner = np.searchsorted(self._low, addresses, side="right").astype(np.int64) - 1
        outside = (owner < 0) | (addresses + item > self._high[np.maximum(owner, 0)])
        if outside.any():
            raise SanitizerError(f"{self._name}: {outside.sum()} of {addresses.size} {kind} lanes out of bounds")
        self._accesses[kind].append((addresses, tuple(program)))

    def end(self) -> None:
        stored = _by_address(self._accesses["store"])
        loaded = _by_address(self._accesses["load"])
        for kind, addresses, programs in (("store", *stored), ("load", *loaded)):
            first = np.searchsorted(stored[0], addresses)
            found = first < len(stored[0])
            found[found] = stored[0][first[found]] == addresses[found]
            racing = found.copy()
            racing[found] = stored[1][first[found]] != programs[found]
            if racing.any():
                raise SanitizerError(f"{self._name}: one program stores what another one {kind}s, {racing.sum()} times")


def _by_address(accesses: list[tuple[np.ndarray, tuple[int, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses in ascending order and the program of each."""
    if not accesses:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    numbers = {program: number for number, program in enumerate(sorted({program for _, program in accesses}))}
    addresses = np.concatenate([addresses for addresses, _ in accesses])
    programs = np.concatenate([np.full(len(addresses), numbers[program]) for addresses, program in accesses])
    order = np.argsort(addresses, kind="stable")
    return addresses[order], programs[order]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


_launches: Launches | None = None


@contextlib.contextmanager
def sanitizer() -> Iterator[Launches]:
    """Checks every launch inside; raises SanitizerError, which Triton wraps in its InterpreterError."""
    global _launches
    _launches = Launches()
    try:
        yield _launches
    finally:
        _launches = None


def interpreted_backend(batch_invariant: bool = True, num_multiprocessors: int = 2, **shape: int) -> Any:
    """The Triton kernels in the corrected interpreter; few large programs, for each costs milliseconds."""
    install()
    from kernels.triton import TritonBackend
    from kernels.triton.layer import DeviceShape

    device_shape = DeviceShape(90, num_multiprocessors, **{"rotated_pairs": 512, **shape})
    return TritonBackend(torch.device("cpu"), batch_invariant, check_faults=True, shape=device_shape)
