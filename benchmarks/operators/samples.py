"""Samples of PyTorch's operator and module databases, as modules whose only inputs are tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from benchmarks.coverage.case import leaves

Tensors = tuple[torch.Tensor, ...]

# Samples of one operator that are read from a database; some operators have thousands.
_MOST = 400
# Elements of a tensor; some samples have a million.
_LARGEST = 1 << 16
# Sizes of the dynamic dimension at which eager must accept a sample, the first of which is the example's. Ingot's proof
# draws 1, 2, 9 and 33 as well.
ANY = (4, 1, 2, 3, 7, 9, 33)
LARGER = (4, 5, 7, 9, 33)
_UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that return memory as it is."""
_OF_ONE_SIZE = {
    *("_native_batch_norm_legit", "_batch_norm_with_update", "native_batch_norm", "searchsorted", "bucketize"),
    *("nn.functional.embedding_bag", "nn.functional.ctc_loss", "nn.CTCLoss"),
}
"""Operators whose kernels read beyond a tensor of another size, or whose boundaries are sorted at one size only."""


NOT_DENSE = "a tensor is complex, sparse or quantized"


class Unjudged(Exception):
    """Eager does not define the sample's answer, or no exporter can express its inputs."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator or a module.

    Attributes:
        text: the arguments, for messages.
        build: returns the module that is called with the tensors.
        tensors: the example's values.
        redrawn: other values of the same kind.
        axes: the dynamic axis of each tensor, if it has one.
        symbol: the name of the dynamic dimension: ``n`` has any size, ``m`` is at least 4; empty without one.
        each: whether an element of the output depends on one element of each input.
    """

    text: str
    build: Callable[[], nn.Module]
    tensors: Tensors
    redrawn: Tensors
    axes: tuple[int | None, ...]
    symbol: str
    each: bool


class Call(nn.Module):
    """Call a function, or a module, whose tensors come from outside and whose other arguments are fixed."""

    def __init__(self, function: Callable[..., Any], structure: Any, constants: Sequence[Any], dtype: torch.dtype):
        super().__init__()
        self.function = function
        self.structure = structure
        self.constants = tuple(constants)
        self.dtype = dtype

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the result, or its numbers as tensors; complex tensors as pairs of real numbers.

        A function without tensors among its arguments, such as ``eye``, is called next to one: a file needs an input.
        """
        args, kwargs = self.arguments(tensors)
        result = self.function(*args, **kwargs)
        found = leaves(result) or [_as_tensor(number) for number in pytree.tree_leaves(result)]
        own = [] if any(item is TENSOR for item in self.constants) else [tensor + 1 for tensor in tensors]
        return tuple(map(_plain, (*found, *own)))

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the other arguments of the function."""
        rest = iter(tensors)
        flat = [next(rest) if item is TENSOR else item for item in self.constants]
        if self.dtype is torch.bfloat16:  # numpy has no such type, so files have float32 at their borders
            flat = [item.to(self.dtype) if _is_float(item) else item for item in flat]
        args, kwargs = pytree.tree_unflatten(flat, self.structure)
        return args, kwargs


class _Tensor:
    """Marks the place of a tensor among the arguments."""


TENSOR = _Tensor()


def _is_float(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def _as_tensor(number: Any) -> torch.Tensor:
    kinds = ((bool | torch.SymBool, torch.bool), (int | torch.SymInt, torch.int64))
    kind = next((dtype for numbers, dtype in kinds if isinstance(number, numbers)), torch.float64)
    return torch.scalar_tensor(number, dtype=kind)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def as_numpy_has_it(item: Any) -> Any:
    """Return a tensor as numpy has it, and everything else as it is."""
    return _plain(item) if isinstance(item, torch.Tensor) else item


@cache
def databases() -> tuple[list[Any], list[Any]]:
    """Return PyTorch's operators and modules. To import them takes seconds, and the package expecttest."""
    from torch.testing._internal import common_methods_invocations as operators
    from torch.testing._internal.common_modules import module_db

    # It would make random operators look deterministic.
    vars(operators)["wrapper_set_seed"] = lambda function, *args, **kwargs: function(*args, **kwargs)
    return operators.op_db, module_db


def names(dtype: torch.dtype) -> list[str]:
    """Return the operators and modules that have samples of a datatype."""
    operators, modules = databases()
    known = {info.full_name for info in operators if dtype in info.dtypes}
    return [*sorted(known), *sorted({_module_name(info) for info in modules if dtype in info.dtypes})]


def _module_name(info: Any) -> str:
    return f"nn.{info.module_cls.__name__}"


def samples(name: str, dtype: torch.dtype, most: int, seed: int) -> tuple[list[Sample], list[str]]:
    """Return up to ``most`` samples of an operator or module, spread over all it has, and why others were left out.

    Left out are those whose answer eager does not define, and those with inputs that are not dense real tensors.
    """
    # The reference inputs of a few operators are all too large.
    first, second = _drawn(name, dtype, seed, "reference_inputs")
    if not first:
        first, second = _drawn(name, dtype, seed, "sample_inputs")
    found, left = [], []
    for index in _chosen([not _elements(item) for item in first], most):
        again = second[index] if index < len(second) else first[index]
        try:
            found.append(_sample(name, dtype, *first[index], again))
        except Unjudged as reason:
            left.append(str(reason))
    return found, left


def _drawn(name: str, dtype: torch.dtype, seed: int, source: str) -> tuple[list[_Read], list[_Read]]:
    """Return an operator's samples from a method of its entry, except large ones, and those of another draw."""
    first, second = (list(islice(_read(name, dtype, number, source), _MOST)) for number in (seed, seed + 1))
    return [item for item in first if _elements(item) <= _LARGEST], [
        item for item in second if _elements(item) <= _LARGEST
    ]


def _chosen(empty: Sequence[bool], most: int) -> list[int]:
    """Return the places of samples, evenly spread; at most one of tensors without elements."""
    full = [index for index, is_empty in enumerate(empty) if not is_empty]
    some = [index for index, is_empty in enumerate(empty) if is_empty][-1:]
    count = min(len(full), max(most - len(some), 1))
    return sorted([full[number * len(full) // count] for number in range(count)] + some)


def _elements(item: _Read) -> int:
    """Return the elements of the largest tensor, or 0 if a tensor has none."""
    tensors = [leaf for leaf in pytree.tree_leaves(item[1]) if isinstance(leaf, torch.Tensor)]
    sizes = [tensor.numel() for tensor in tensors]
    return max(sizes, default=1) if all(sizes) else 0


_Read = tuple[Callable[[], Callable[..., Any]], Any, bool]


def _read(name: str, dtype: torch.dtype, seed: int, source: str) -> Iterator[_Read]:
    """Yield the builder of the function, its arguments, and whether it works on each element alone."""
    operators, modules = databases()
    torch.manual_seed(seed)
    for info in operators:
        if info.full_name == name and dtype in info.dtypes:
            each = type(info).__name__ in ("UnaryUfuncInfo", "BinaryUfuncInfo")
            for item in getattr(info, source)("cpu", dtype, set_seed=False):
                yield partial(_function, info), ((item.input, *item.args), dict(item.kwargs)), each
    for info in modules:
        if _module_name(info) == name and dtype in info.dtypes:
            inputs = info.module_inputs_func(info, "cpu", dtype, requires_grad=False, training=False)
            for item in inputs:
                if item.forward_input is not None:
                    made, call = item.constructor_input, item.forward_input
                    yield _module(info.module_cls, made, dtype), (call.args, dict(call.kwargs)), False


def _function(info: Any) -> Callable[..., Any]:
    """Return an operator as models call it, by its name in ``torch``, under which exporters may replace it."""
    path, _, name = f"torch.{info.name}".rpartition(".")
    owner = sys.modules.get(path)
    if getattr(owner, name, None) is not info.op:
        return info.op  # type: ignore[no-any-return]
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def _module(kind: type[nn.Module], made: Any, dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: kind(*made.args, **made.kwargs).to(dtype)


def _sample(
    name: str, dtype: torch.dtype, function: Callable[[], Callable[..., Any]], arguments: Any, each: bool, again: _Read
) -> Sample:
    flat, structure = pytree.tree_flatten(arguments)
    given = [item.detach() for item in flat if isinstance(item, torch.Tensor)]
    if any(tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized for tensor in given):
        raise Unjudged(NOT_DENSE)
    tensors = tuple(tensor.contiguous() for tensor in given) or (torch.arange(3.0),)
    constants = [TENSOR if isinstance(item, torch.Tensor) else item for item in flat]
    if dtype is torch.bfloat16:
        tensors = tuple(tensor.float() if tensor.dtype is dtype else tensor for tensor in tensors)
    if any(tensor.dtype is torch.bfloat16 for tensor in tensors):
        raise Unjudged("an input of another argument is bfloat16, which numpy lacks")

    def build() -> nn.Module:
        module = Call(function(), structure, constants, dtype)
        if any(map(is_lazy, module.parameters())):
            run(module.eval(), tensors)  # the first call draws the weights
        return module

    torch.manual_seed(0)
    module = build().eval()
    _check_defined(name, module, tensors)
    symbol, axes = _dynamic(module, tensors) if name not in _OF_ONE_SIZE else ("", (None,) * len(tensors))
    return Sample(_text(flat), build, tensors, _redrawn(tensors, again[1], dtype), axes, symbol, each)


def _check_defined(name: str, module: nn.Module, tensors: Tensors) -> None:
    """Raise Unjudged unless eager answers with tensors, the same for several states of its random numbers."""
    first, *others = (run(module, tensors, seed) for seed in range(6))
    if name in _UNDEFINED:
        raise Unjudged("the answer is memory as it is")
    if not first:
        raise Unjudged("eager refuses the sample on a CPU")
    if any(tensor.layout is not torch.strided for tensor in first):
        raise Unjudged(NOT_DENSE)
    if not all(other is not None and all(map(_same, first, other)) for other in others):
        raise Unjudged("the answer is random")


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.nan_to_num(nan=7.25), right.nan_to_num(nan=7.25))


def run(module: nn.Module, tensors: Tensors, seed: int = 0, *, keep: bool = False) -> list[torch.Tensor] | None:
    """Return eager's answer, or None if eager refuses the values.

    The module gets copies of the tensors, which may change, unless their places in memory are to be kept.
    """
    torch.manual_seed(seed)
    try:
        with torch.no_grad():
            return list(module(*(tensor if keep else tensor.clone() for tensor in tensors)))
    except Exception:  # noqa: BLE001 - operators may raise anything, and only an answer is judged
        return None


def _dynamic(module: nn.Module, tensors: Tensors) -> tuple[str, tuple[int | None, ...]]:
    """Return the dynamic dimension: the first or the last of all tensors that share its size, or of the input only."""
    fixed: tuple[int | None, ...] = (None,) * len(tensors)
    if not tensors[0].ndim:
        return "", fixed
    for axis in dict.fromkeys((0, tensors[0].ndim - 1)):
        size = tensors[0].shape[axis]
        own = (axis, *fixed[1:])
        place = axis - tensors[0].ndim if axis else 0
        shared = tuple(_axis(tensor, place, size) for tensor in tensors)
        for axes in dict.fromkeys((shared, own)) if size else ():
            for symbol, sizes in (("n", ANY), ("m", LARGER)):
                if all(run(module, resized(tensors, axes, number)) is not None for number in sizes):
                    return symbol, axes
    return "", fixed


def _axis(tensor: torch.Tensor, place: int, size: int) -> int | None:
    axis = place % tensor.ndim if tensor.ndim and -tensor.ndim <= place < tensor.ndim else None
    return axis if axis is not None and tensor.shape[axis] == size else None


def resized(tensors: Tensors, axes: Sequence[int | None], size: int) -> Tensors:
    """Repeat or cut tensors along their dynamic axes."""
    return tuple(
        tensor if axis is None else tensor.index_select(axis, torch.arange(size) % tensor.shape[axis])
        for tensor, axis in zip(tensors, axes, strict=True)
    )


def _redrawn(tensors: Tensors, arguments: Any, dtype: torch.dtype) -> Tensors:
    """Return the tensors of another draw if it has the same structure."""
    flat = [item for item in pytree.tree_leaves(arguments) if isinstance(item, torch.Tensor)]
    if [item.shape for item in flat] != [tensor.shape for tensor in tensors]:
        return tensors
    return tuple(item.detach().contiguous().to(tensor.dtype) for item, tensor in zip(flat, tensors, strict=True))


def _text(flat: Sequence[Any]) -> str:
    return ", ".join(str(list(item.shape)) if isinstance(item, torch.Tensor) else str(item) for item in flat)[:120]
