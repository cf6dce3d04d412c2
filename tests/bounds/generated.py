"""Random calls of single operators: what the rules believe of their outputs, compared with what ONNX Runtime returns.

The modules of `recipes` make the calls. The bounds of an input are drawn at random too, from those that its value
satisfies: a size may be known, a symbol, or only limited, and an output may be an input of a later call. A call that
the rules do not call bounded is not run, so no call may end the process: tests run them in another one, see
__main__.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from ingot.bounds import graph as reader
from ingot.bounds.abstract import BOOL, INTEGERS, STRING, Tensor, Text
from ingot.bounds.analysis import Analysis, Scope
from ingot.bounds.interval import Interval
from ingot.bounds.poly import ZERO, Poly, Size, product

Array = np.ndarray[Any, Any]

SYMBOLS = {f"{name}{size}": size for name in "abc" for size in range(1, 13)} | {"request": 40}
"""The sizes of the run. Several symbols have the same size, and some are 1. ``request`` are the bytes of all texts."""
KINDS = {
    "f": (1, np.float32),
    "d": (11, np.float64),
    "h": (10, np.float16),
    "i": (7, np.int64),
    "j": (6, np.int32),
    "u": (2, np.uint8),
    "s": (3, np.int8),
    "w": (4, np.uint16),
    "b": (9, np.bool_),
    "t": (8, np.object_),
}
LARGEST = 1 << 24  # bytes; larger calls are bounded, but slow to run
OPSETS = (11, 13, 17, 18, 20, 22, 23)


@dataclass(frozen=True)
class Value:
    """An input of a call: its elements, what the rules know of it, and whether it is a constant of the graph."""

    array: Array
    bounds: Tensor
    constant: bool = False


@dataclass
class Call:
    """A node and its inputs; None is an omitted one. ``outer`` are tensors that its inner graphs read by name."""

    operator: str
    inputs: Sequence[Value | None]
    outputs: int = 1
    domain: str = ""
    version: int = 1
    since: int = 13
    until: int = 23
    attributes: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Value] = field(default_factory=dict)


class Maker:
    """Draws sizes, values and their bounds; remembers the outputs of earlier calls."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.known: list[Value] = []
        self.loose: list[Tensor] = []

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def size(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 10, 12) if self.chance(0.7) else (2, 3, 4, 5, 7, 10))

    def sizes(self, count: int) -> list[int]:
        return [self.size() for _ in range(count)]

    def shape(self, most: int = 4) -> list[int]:
        return self.sizes(self.rng.randint(0, most))

    def near(self, shape: Sequence[int]) -> list[int]:
        """Return a shape that is broadcast against another, either of which may be the larger."""
        found = [self.pick(1, size) if self.chance(0.4) else size for size in shape]
        found = [self.size() if size == 1 and self.chance(0.4) else size for size in found]
        if self.chance(0.2):
            return found[self.rng.randint(0, len(found)) :]
        return [*self.sizes(self.rng.randint(0, 2)), *found] if self.chance(0.1) else found

    def tensor(self, kinds: str, shape: Sequence[int], low: float = -3, high: float = 12) -> Value:
        """Return a tensor of one of the kinds, perhaps the output of an earlier call."""
        kind, dtype = KINDS[self.pick(*kinds)]
        if self.chance(0.4):
            fits = [v for v in self.known if v.array.shape == tuple(shape) and v.bounds.kind == kind]
            if fits:
                return self.rng.choice(fits)
        if kind == STRING:
            return self.texts(shape)
        array: Array
        if dtype is np.bool_:
            array = np.array(self.numbers(shape, 0, 1)).astype(bool)
        elif np.issubdtype(dtype, np.integer):
            array = np.array(self.numbers(shape, max(low, 0) if dtype in (np.uint8, np.uint16) else low, high))
        else:
            array = np.array(self.numbers(shape, low, high)) + self.pick(0, 0.5, 0.3)
        return self.known_of(array.astype(dtype).reshape(shape), kind)

    def numbers(self, shape: Sequence[int], low: float, high: float) -> list[int]:
        return self.rng.choices(range(int(low), int(high) + 1), k=int(np.prod(shape)))

    def ints(self, values: Any, kinds: str = "i", *, constant: bool | None = None) -> Value:
        """Return integers, such as sizes, that the rules often know something of."""
        kind, dtype = KINDS[self.pick(*kinds)]
        return self.known_of(np.array(values, dtype), kind, constant=self.chance(0.4) if constant is None else constant)

    def texts(self, shape: Sequence[int]) -> Value:
        """Return texts of the client, with all bytes of its request, or of the graph."""
        count = int(np.prod(shape))
        words = ["".join(self.pick(*"aBß €") for _ in range(self.rng.randint(0, 6))) for _ in range(count)]
        if count and self.chance(0.6):
            spent = sum(len(word.encode()) for word in words[1:])
            words[0] = "x" * (SYMBOLS["request"] - spent)
            if spent > SYMBOLS["request"]:
                words = ["x" * SYMBOLS["request"], *[""] * (count - 1)]
            text = Text(Poly.symbol("request"), 0)
        else:
            text = Text(ZERO, max((len(word.encode()) for word in words), default=0))
        array = np.array(words, object).reshape(shape)
        return Value(array, Tensor.of(STRING, self.dims(array.shape), text=text), False)

    def known_of(self, array: Array, kind: int, *, constant: bool = False) -> Value:
        if constant:
            return Value(array, Tensor.constant(reader.Constant(kind, array.shape, _flat(array))), True)
        equal = [bounds for bounds in self.loose if bounds.kind == kind and _holds(bounds, array.shape)]
        if equal and self.chance(0.5):  # equal bounds are not equal sizes
            return Value(array, self.rng.choice(equal))
        dims = self.dims(array.shape)
        count = None
        if 1 <= array.size <= 12 and self.chance(0.3):  # as Reshape to sizes from values makes it
            count = self.symbol(array.size)
            dims = [Interval.up_to(count)] * array.ndim
        elif any(dim.exact is None for dim in dims) and self.chance(0.5):
            count = product(map(self.symbol, array.shape)) if array.size else self.symbol(1)
        values = array.reshape(-1).tolist()
        items, each = None, None
        if array.size <= 12 and self.chance(0.6):
            items = [self.interval(value) for value in values]
        if kind in INTEGERS and values:
            low, high = min(values), max(values)
            each = self.interval(low).joined(self.interval(high))
        if any(dim.exact is None for dim in dims):
            self.loose = [*self.loose[-5:], Tensor.of(kind, dims, count=count)]
        return Value(array, Tensor.of(kind, dims, count=count, items=items, each=each))

    def misfit(self, call: Call) -> Call:
        """Return a call with another size in one of its inputs, which does not fit the others or the operator."""
        inputs = [*call.inputs]
        places = [place for place, value in enumerate(inputs) if value is not None and _can_be_resized(value)]
        if not places:
            return call
        place = self.pick(*places)
        value = inputs[place]
        assert value is not None
        shape = [*value.array.shape]
        shape[self.rng.randrange(len(shape))] = self.size()
        inputs[place] = self.known_of(np.resize(value.array, shape), value.bounds.kind)
        return replace(call, inputs=inputs)

    def symbol(self, size: int) -> Poly:
        if not 1 <= size <= 12 or self.chance(0.3):
            return Poly.of(size)
        return Poly.symbol(f"{self.pick(*'abc')}{size}")

    def dims(self, shape: Sequence[int]) -> list[Interval]:
        """Return bounds of sizes: sometimes the sizes themselves, sometimes only the largest that they may be."""
        loose = self.pick(0.0, 0.0, 0.3, 1.0)
        return [self.dim(size, loose=self.chance(loose)) for size in shape]

    def dim(self, size: int, *, loose: bool) -> Interval:
        if size == 0:
            return Interval.exactly(0) if self.chance(0.3) else Interval.up_to(self.symbol(self.rng.randint(1, 5)))
        return Interval.up_to(self.symbol(size + self.pick(0, 0, 2))) if loose else self.exactly(size)

    def exactly(self, size: int) -> Interval:
        return Interval.exactly(self.symbol(size))

    def interval(self, value: Any) -> Interval:
        """Return an interval that contains a value."""
        if isinstance(value, bool):
            value = int(value)
        if isinstance(value, float) and not np.isfinite(value):
            return Interval()
        choice = self.rng.random()
        if choice < 0.4:
            return Interval.exactly(Fraction(value))
        if choice < 0.7 and isinstance(value, int) and 1 <= value <= 12:
            return Interval.exactly(Poly.symbol(f"{self.pick(*'abc')}{value}"))
        if choice < 0.9 and isinstance(value, int) and 0 <= value <= 12:
            return Interval.up_to(self.symbol(max(value, 1)))
        return Interval()


def _holds(bounds: Tensor, shape: Sequence[int]) -> bool:
    dims = bounds.dims or ()
    fits = len(dims) == len(shape) and all(within(size, dim) for size, dim in zip(shape, dims, strict=True))
    return fits and int(np.prod(shape)) <= at(bounds.count)


def _can_be_resized(value: Value) -> bool:
    return value.array.ndim > 0 and value.array.size > 0 and value.array.dtype != object and not value.constant


def _flat(array: Array) -> Any:
    return None if array.dtype in (object, np.float16) else np.ascontiguousarray(array).reshape(-1)


def model_of(call: Call, opset: int) -> tuple[bytes, dict[str, Value]]:
    """Return the graph of one node, and its inputs by name."""
    names = [f"i{place}" if value is not None else "" for place, value in enumerate(call.inputs)]
    values = {name: value for name, value in zip(names, call.inputs, strict=True) if value is not None} | call.outer
    outputs = [f"o{place}" for place in range(call.outputs)]
    attributes = {name: value for name, value in call.attributes.items() if value is not None}
    node = helper.make_node(call.operator, names, outputs, domain=call.domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, value.bounds.kind, [None] * value.array.ndim)
        for name, value in values.items()
        if not value.constant
    ]
    constants = [numpy_helper.from_array(value.array, name) for name, value in values.items() if value.constant]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], constants)
    opsets = [helper.make_opsetid("", opset)]
    opsets += [helper.make_opsetid(call.domain, call.version)] if call.domain else []
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString(), values


def believed(content: bytes, values: dict[str, Value]) -> tuple[list[str], Sequence[Tensor | None], Poly]:
    """Return the reasons why a call is not bounded, and the bounds of its outputs and of its peak."""
    model = reader.read(content)
    analysis = Analysis(model)
    scope = Scope({name: value.bounds for name, value in values.items() if not value.constant})
    outputs, peak = analysis.analyse(model.graph, scope)
    return analysis.reasons, outputs, peak


def run(content: bytes, values: dict[str, Value]) -> tuple[Sequence[Any], str]:
    """Return the outputs, or none and the error if the engine refuses the call."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    feed = {name: value.array for name, value in values.items() if not value.constant}
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        return session.run(None, feed), ""
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises classes without a common base
        return (), str(error)


def at(poly: Poly) -> Fraction:
    total = Fraction(0)
    for monomial, factor in poly.terms.items():
        for name, power in monomial:
            computed = name.value(SYMBOLS) if isinstance(name, Size) and name.value is not None else SYMBOLS[name]
            factor *= computed**power
        total += factor
    return total


def within(value: Any, interval: Interval) -> bool:
    if isinstance(value, float) and not np.isfinite(value):
        return interval.low is None or interval.high is None
    if interval.low is not None and at(interval.low) > value:
        return False
    return interval.high is None or value <= at(interval.high)


def departures(tensor: Tensor, answer: Array) -> list[str]:
    """Return the false claims of a rule about an output."""
    found = []
    if answer.size > at(tensor.count):
        found.append(f"{answer.size} elements over {at(tensor.count)}")
    if tensor.dims is not None and len(tensor.dims) != answer.ndim:
        found.append(f"rank {answer.ndim} instead of {len(tensor.dims)}")
    elif tensor.dims is not None:
        pairs = zip(answer.shape, tensor.dims, strict=True)
        found += [f"size {size} outside {_text(dim)}" for size, dim in pairs if not within(size, dim)]
    if answer.nbytes > at(tensor.nbytes) and answer.dtype != object:
        found.append(f"{answer.nbytes} bytes over {at(tensor.nbytes)}")
    if answer.dtype == object:
        return found + _texts(tensor, answer)
    kind = helper.np_dtype_to_tensor_dtype(answer.dtype)
    if tensor.kind not in (0, kind):
        found.append(f"datatype {kind} instead of {tensor.kind}")
    values = answer.reshape(-1).tolist()
    if kind in INTEGERS or kind == BOOL:
        found += [f"value {value} outside {_text(tensor.each)}" for value in values if not within(value, tensor.each)]
    if tensor.items is not None:
        if len(tensor.items) != len(values):
            return [*found, f"{len(values)} values instead of {len(tensor.items)}"]
        pairs = zip(values, tensor.items, strict=True)
        found += [f"value {value} outside {_text(item)}" for value, item in pairs if not within(value, item)]
    return found


def _texts(tensor: Tensor, answer: Array) -> list[str]:
    used = sum(len(str(text).encode()) for text in answer.reshape(-1))
    if tensor.text is None:
        return ["texts of unknown length"] if used else []
    most = at(tensor.text.sent) + tensor.text.width * answer.size
    return [f"texts of {used} bytes over {most}"] if used > most else []


def _text(interval: Interval) -> str:
    low, high = (None if end is None else float(at(end)) for end in (interval.low, interval.high))
    return f"{low}..{high}"


@dataclass
class Outcome:
    """What became of the calls of each operator: how many ran, what was believed wrongly, the last refusal."""

    ran: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def attempt(maker: Maker, call: Call, outcome: Outcome) -> bool:
    """Run a call if it is bounded, compare its outputs with what the rules believed, and return whether it ran."""
    name = f"{call.domain}.{call.operator}" if call.domain else call.operator
    opset = maker.pick(*(version for version in OPSETS if call.since <= version <= call.until), call.since)
    content, values = model_of(call, opset)
    reasons, bounds, peak = believed(content, values)
    if reasons or at(peak) > LARGEST:
        outcome.refused[name] = (reasons or ["it is large"])[0]
        return False
    answers, error = run(content, values)
    if error:
        outcome.refused[name] = error
        return False
    outcome.ran[name] += 1
    for place, (tensor, answer) in enumerate(zip(bounds, answers, strict=False)):
        if not isinstance(answer, np.ndarray):
            continue
        wrong = ["unknown"] if tensor is None else departures(tensor, answer)
        if wrong:
            outcome.wrong.append(f"{described(call)}, opset {opset}, output {place} {list(answer.shape)}: {wrong[0]}")
        elif tensor is not None and answer.size <= 4096:
            maker.known.append(Value(answer, tensor))
            del maker.known[:-60]
    return True


def described(call: Call) -> str:
    inputs = [None if value is None else _value(value) for value in (*call.inputs, *call.outer.values())]
    attributes = {name: value for name, value in call.attributes.items() if not isinstance(value, onnx.GraphProto)}
    return f"{call.operator} of {inputs}, {attributes}"


def _value(value: Value) -> str:
    dims = "?" if value.bounds.dims is None else ", ".join(map(_text, value.bounds.dims))
    items = f" = {value.array.reshape(-1).tolist()}" if value.array.size < 9 else ""
    return f"{value.array.dtype}{list(value.array.shape)} in [{dims}]{items}"
