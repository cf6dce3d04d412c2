"""The definition of a custom operator, and the registry of those defined in this process."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from onnxscript.values import OnnxFunction

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument
from ingot.export.rewrite.ops import kernels
from ingot.export.rewrite.ops.formula import FormulaRule
from ingot.export.rewrite.passes.manager import FxPass
from ingot.export.torch_internals import FunctionSchema, OpOverload, parse_schema, schema

P = ParamSpec("P")
R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_NATIVE = re.compile(r"[A-Za-z_][\w.]*::[A-Za-z_]\w*")
_DEFINED: dict[str, Op[Any, Any]] = {}


class Op(Generic[P, R]):
    """A custom operator, made by :func:`op`. A call runs its body, or its compiled kernel if it has one.

    Attributes:
        name: such as ``acme::gated_rms_norm``, whose ONNX domain is ``acme``.
        body: the Python function that defines it.
        example: arguments to call it with, or empty.
        spellings: further functions that its rewrite rule looks for.
        onnx: its ONNX function, or None if that is derived from the body.
        native: the ONNX Runtime operator that it becomes instead, or None.
        attributes: names of ONNX attributes by parameter, where they differ.
        outputs: how many tensors it returns.
        tensors: the parameters whose type is a tensor, a list of tensors, or a tensor or None.
    """

    def __init__(
        self,
        name: str,
        body: Callable[P, R],
        example: Sequence[Any],
        spellings: Sequence[Callable[..., Any]],
        fake: Callable[..., Any] | None,
        onnx: OnnxFunction[..., Any] | None,
        native: str | None,
        attributes: Mapping[str, str],
    ):
        self.name, self.body = name, body
        self.example, self.spellings = tuple(example), tuple(spellings)
        self.onnx, self.native, self.attributes = onnx, native, dict(attributes)
        self._signature = inspect.signature(body)
        functools.update_wrapper(self, body)
        schema = _read_schema(name, body)
        self.outputs = len(schema.returns)
        self.tensors = frozenset(item.name for item in schema.arguments if "Tensor" in str(item.type))
        torch.library.custom_op(name, body, mutates_args=()).register_fake(fake or body)

    @property
    def overload(self) -> OpOverload:
        """The target of its calls in FX graphs."""
        namespace, _, name = self.name.partition("::")
        return getattr(getattr(torch.ops, namespace), name).default  # type: ignore[no-any-return]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.overload(*args, **kwargs)  # type: ignore[no-any-return]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return every argument of a call by its parameter's name, defaults included."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run ``torch.library.opcheck``: schema, shapes, autograd registration, tracing with dynamic shapes.

        Args:
            args: positional arguments of a call; by default the example.
            kwargs: keyword arguments of the call.

        Raises:
            ExportError: a check fails, such as for an output that is a view of an input.
        """
        if not args and not kwargs:
            args = self._example()

        def failed(error: Exception) -> str:
            return f"operator '{self.name}' fails torch.library.opcheck: {foreign.one_line(error)}"

        with foreign.reported_as(ExportError, failed):
            torch.library.opcheck(self.overload, args, kwargs)

    def rule(self) -> FxPass:
        """Return the rewrite rule that replaces the operator's formula in a captured model by the operator.

        Raises:
            InvalidArgument: the operator has no example.
        """
        return self._rule

    @functools.cached_property  # traces the formula once
    def _rule(self) -> FxPass:
        class Rule(FormulaRule):
            name = self.name

        return Rule(self.overload, (self.body, *self.spellings), self.bind(self._example(), {}))

    def kernel(self, device: str, *sources: str | Path) -> None:
        """Compile a kernel, which then replaces the body on one kind of device in this process.

        Args:
            device: ``cpu`` or ``cuda``.
            sources: C++ or CUDA files that register it: ``TORCH_LIBRARY_IMPL(acme, CPU, m) { m.impl("name", &f); }``.

        Raises:
            NotFound: a source file is missing.
            Unsupported: this machine lacks the device.
            InvalidArgument: the operator has no example, or the sources cannot be built or register nothing for it.
            ParityError: the kernel and the body return different results for the example.
        """
        kernels.load(self.overload, self.body, self.bind(self._example(), {}), device, sources)

    def _example(self) -> tuple[Any, ...]:
        if not self.example:
            raise InvalidArgument(f"operator '{self.name}' has no example; add one: @ingot.op(..., example=(...))")
        return self.example


def op(
    name: str,
    *,
    example: Sequence[Any] = (),
    spellings: Sequence[Callable[..., Any]] = (),
    fake: Callable[..., Any] | None = None,
    onnx: OnnxFunction[..., Any] | None = None,
    native: str | None = None,
    attributes: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make a Python function of tensors an operator.

    The function's parameters and result must have type annotations that ``torch.library.custom_op`` supports. It must
    not change its arguments, and must not return one of them or a view of one.

    Examples:
        >>> @ingot.op("acme::halved", example=(torch.ones(2),))
        ... def halved(x: torch.Tensor) -> torch.Tensor:
        ...     return x / 2
        >>> halved(torch.ones(2))
        tensor([0.5000, 0.5000])

    Args:
        name: ``namespace::name``.
        example: arguments to trace its rewrite rule with, and to check it with.
        spellings: functions with the same parameters and result, which the rewrite rule also finds.
        fake: returns a result of the right shape and type without values; by default the body.
        onnx: its form as an onnxscript function with the same parameter names; by default derived from the body.
        native: an ONNX Runtime operator with the same inputs in the same order, such as
            ``com.microsoft::BiasGelu``. The model then runs in ONNX Runtime only.
        attributes: names of ONNX attributes by parameter, where they differ, such as ``{"eps": "epsilon"}``.

    Raises:
        InvalidArgument: the name, the parameters or the result are not valid for an operator.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"'{name}' cannot name an operator; write namespace::name, such as acme::gated_rms_norm")
    if native is not None and not _NATIVE.fullmatch(native):
        raise InvalidArgument(f"'{native}' cannot name a native operator; write domain::Name: com.microsoft::BiasGelu")

    if onnx is not None and not isinstance(onnx, OnnxFunction):
        raise InvalidArgument(
            f"the ONNX form of operator '{name}' is {type(onnx).__name__}; make it an ONNX function with "
            "@onnxscript.script()"
        )

    def define(body: Callable[P, R]) -> Op[P, R]:
        made = Op(name, body, example, spellings, fake, onnx, native, attributes or {})
        _DEFINED[name] = made
        return made

    return define


def _read_schema(name: str, body: Callable[..., Any]) -> FunctionSchema:
    """Return the schema of a function's parameters and result.

    Raises:
        InvalidArgument: they are not valid for an operator, or PyTorch has an operator of this name.
    """
    namespace, _, short = name.partition("::")
    if name not in _DEFINED and hasattr(getattr(torch.ops, namespace), short):
        raise InvalidArgument(f"PyTorch already has an operator '{name}'; use another namespace")
    try:
        schema = parse_schema(f"{name}{torch.library.infer_schema(body, mutates_args=())}")
    except (ValueError, RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).removeprefix("infer_schema(func): ").split())
        raise InvalidArgument(f"'{name}' cannot be an operator: {reason}") from error
    if {str(item.type) for item in schema.returns} != {"Tensor"}:
        raise InvalidArgument(f"'{name}' cannot be an operator: it must return a tensor or a tuple of tensors")
    return schema


def defined(target: Any) -> Op[Any, Any] | None:
    """Return the operator that a node of an FX graph calls, or None if it is not a custom operator."""
    return _DEFINED.get(schema(target).name) if isinstance(target, OpOverload) else None


def operators() -> tuple[Op[Any, Any], ...]:
    """Return all operators that this process has defined."""
    return tuple(_DEFINED.values())


def rules() -> tuple[FxPass, ...]:
    """Return the rewrite rules of all operators that this process has defined with an example."""
    return tuple(item.rule() for item in operators() if item.example)
