"""The interface of a model's class: which methods it has, and the signature that it declares or its type hints state.

A class declares ``inputs`` and ``outputs`` as texts, such as ``"text:str[batch]"``, or a ``signature``. Otherwise the
hints of ``predict`` or ``predict_one`` are read: a ``TypedDict``, or one value. Arrays need ``Annotated[np.ndarray,
"float32[batch,4]"]``, since the types of numpy have no sizes.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, Unsupported
from ingot.tensors import DType, Range, Signature, TensorSpec, parse_spec

BATCH = "batch"
OUTPUT = "output"
"""The name of an output that is returned as such, not in a dict."""

_SCALARS = {str: "str", bytes: "bytes", int: "int64", float: "float64", bool: "bool"}
_GENERATORS = (Generator, Iterator, Iterable, AsyncGenerator, AsyncIterator, AsyncIterable)
_EXAMPLE = "inputs = ['text:str[batch]'] and outputs = ['score:float32[batch]']"


@dataclass(frozen=True)
class Interface:
    """How a model is called.

    Attributes:
        signature: its inputs and outputs, each with a leading batch dimension.
        method: ``predict``, which gets a batch, or ``predict_one``, which gets a sample.
        lists: inputs that ``predict`` gets as lists.
        texts: inputs whose elements are ``str``; those of other BYTES inputs are ``bytes``.
        bare: whether the only input is passed as such, not in a dict.
        yields: whether ``predict_one`` returns a generator: a sample gets several answers.
    """

    signature: Signature
    method: str
    lists: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    bare: bool = False
    yields: bool = False

    @property
    def by_sample(self) -> bool:
        return self.method == "predict_one"


@dataclass(frozen=True)
class _Side:
    """The inputs or outputs: their specs, the type of each as it is written, and the ranges of dimensions."""

    specs: Mapping[str, TensorSpec]
    kinds: Mapping[str, str]
    ranges: Mapping[str, Range]
    lists: frozenset[str] = frozenset()
    bare: bool = False


def interface_of(model: type) -> Interface:
    """Return the interface of a class.

    Raises:
        InvalidArgument: it has no method to call, or its signature is not known or cannot be served.
        Unsupported: ``predict`` yields.
    """
    method = _method(model)
    yields = _yields(model, method)
    if isinstance(declared := vars(model).get("signature"), Signature):
        _check_batched(model, (*declared.inputs, *declared.outputs))
        texts = (spec.name for spec in declared.inputs if spec.dtype is DType.BYTES)
        return Interface(replace(declared, batch=BATCH), method, frozenset(texts), yields=yields)
    inputs, outputs = _sides(model, method)
    _check_batched(model, (*inputs.specs.values(), *outputs.specs.values()))
    signature = Signature(
        tuple(inputs.specs.values()), tuple(outputs.specs.values()), BATCH, {**outputs.ranges, **inputs.ranges}
    )
    texts = (name for name, kind in inputs.kinds.items() if kind in ("str", "string", "text"))
    raw = {name for name, spec in inputs.specs.items() if spec.dtype is DType.BYTES}
    return Interface(signature, method, inputs.lists | raw, frozenset(texts), inputs.bare, yields)


def _method(model: type) -> str:
    found = [name for name in ("predict", "predict_one") if callable(getattr(model, name, None))]
    if len(found) != 1:
        have = "both predict and predict_one" if found else "neither predict(self, batch) nor predict_one(self, sample)"
        hint = "; leave one out" if found else f"; define one. If it is a module of PyTorch, export {_path(model)}"
        raise InvalidArgument(f"class {model.__name__} has {have}{hint}")
    return found[0]


def _yields(model: type, method: str) -> bool:
    """Return whether a method is a generator, or its type hint says that it returns one."""
    function = getattr(model, method)
    hint = typing.get_origin(_hints(model, method).get("return"))
    found = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function) or hint in _GENERATORS
    if found and method == "predict":
        raise Unsupported(
            f"{model.__name__}.predict yields: only predict_one(self, sample) can answer in parts, since each request "
            "of a batch has its own number of answers"
        )
    return found


def _hints(model: type, method: str) -> dict[str, Any]:
    """Return the type hints of a method.

    Raises:
        InvalidArgument: they cannot be read.
    """
    try:
        return typing.get_type_hints(getattr(model, method), include_extras=True)
    except Exception as error:  # hints are the user's expressions
        raise InvalidArgument(f"the type hints of {model.__name__}.{method} cannot be read: {error}") from error


def _path(model: type) -> str:
    return f"by its import path ({model.__module__}:{model.__name__})"


def _sides(model: type, method: str) -> tuple[_Side, _Side]:
    inputs, outputs = getattr(model, "inputs", None), getattr(model, "outputs", None)
    if isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple):
        return _declared(inputs), _declared(outputs)
    hints = _hints(model, method)
    parameters = [*inspect.signature(getattr(model, method)).parameters][1:]
    if len(parameters) != 1 or parameters[0] not in hints or "return" not in hints:
        raise InvalidArgument(
            f"the inputs and outputs of {model.__name__} are not known: declare them in the class, such as {_EXAMPLE}, "
            f"or give {method} one parameter and type hints, such as text: list[str] or a TypedDict"
        )
    where = f"{model.__name__}.{method}"
    return (
        _hinted(hints[parameters[0]], parameters[0], where, one=method == "predict_one"),
        _hinted(_yielded(hints["return"]), OUTPUT, where, one=method == "predict_one"),
    )


def _yielded(hint: Any) -> Any:
    """Return the type of a generator's answers; any other hint as it is."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) in _GENERATORS else hint


def _declared(texts: Sequence[str]) -> _Side:
    specs: dict[str, TensorSpec] = {}
    kinds, ranges = {}, {}
    for text in texts:
        spec, found = parse_spec(text)
        if spec.name in specs:
            raise InvalidArgument(f"'{spec.name}' is declared twice, as '{specs[spec.name]}' and '{spec}'; rename one")
        specs[spec.name] = spec
        kinds[spec.name] = text.strip().removeprefix(f"{spec.name}:").partition("[")[0].lower()
        ranges.update(found)
    return _Side(specs, kinds, ranges)


def _hinted(hint: Any, name: str, where: str, *, one: bool) -> _Side:
    bare = not typing.is_typeddict(hint)
    fields = {name: hint} if bare else typing.get_type_hints(hint, include_extras=True)
    side = _declared([_written(item, kind, where, one=one) for item, kind in fields.items()])
    lists = (item for item, kind in fields.items() if not _annotated(kind))
    return replace(side, lists=frozenset(lists), bare=bare)


def _written(name: str, hint: Any, where: str, *, one: bool) -> str:
    """Return the text form of a type hint."""
    if (text := _annotated(hint)) is not None:
        return f"{name}:{text.replace('[', f'[{BATCH},', 1).replace(',]', ']') if one else text}"
    element = hint if one else (typing.get_args(hint) or (None,))[0] if typing.get_origin(hint) is list else None
    if isinstance(element, type) and issubclass(element, np.generic):
        return f"{name}:{np.dtype(element).name}[{BATCH}]"
    if element not in _SCALARS:
        form = "'float32[4]'" if one else "'float32[batch,4]'"
        simple = "str, bytes, int, float, bool" if one else "list[str], list[bytes], list[int], list[float], list[bool]"
        raise InvalidArgument(
            f"the type hint {getattr(hint, '__name__', hint)} of '{name}' in {where} does not state a datatype and a "
            f"shape; write Annotated[np.ndarray, {form}], or one of {simple}"
        )
    return f"{name}:{_SCALARS[element]}[{BATCH}]"


def _annotated(hint: Any) -> str | None:
    """Return the text of ``Annotated[T, "float32[batch,4]"]``."""
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, str)), None)


def _check_batched(model: type, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        if not spec.shape or spec.shape[0] != BATCH or spec.shape.count(BATCH) > 1:
            raise InvalidArgument(
                f"'{spec}' of {model.__name__} must have '{BATCH}' as its first dimension, and only there"
            )
