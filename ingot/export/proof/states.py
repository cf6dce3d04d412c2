"""State that a module keeps between calls: lifted, held as a constant, or refused by name.

Calls in a row are compared with calls of a module that was not called before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ingot.errors import ExportError, ParityError
from ingot.export.program import Eager, States
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import TOLERANCE
from ingot.export.snapshot import ATTRIBUTE, BUFFER, PARAMETER, Change, equal
from ingot.tensors import Array, DType, arrays

Inputs = Mapping[str, Array]
Outputs = dict[str, Array]
# Added to a number that changes at each call, to see whether a later call returns something else.
_MANY_CALLS = 1000
# The most other sizes at which a module that changes its attributes is called in between.
_OTHER_SIZES = 3


@dataclass(frozen=True)
class Kept:
    """The state that a module keeps between calls.

    Attributes:
        states: buffers and inputs that it changes, which must be lifted.
        scratch: buffers that it overwrites before it reads them.
        filled: buffers and attributes that its first call fills, with the same values whatever the inputs' values.
    """

    states: States = field(default_factory=States)
    scratch: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()


class Calls:
    """Calls of a module in a row, each compared with the same call of a module that was not called before.

    Raises:
        ExportError: the module runs on inputs, but not after other calls.
    """

    def __init__(self, eager: Eager, examples: Examples):
        self.eager = eager
        self.examples = examples
        self._alone: dict[int, tuple[Outputs, dict[str, Any]]] = {}
        self.inputs = list(_inputs(examples))
        try:
            self.outputs, self.last = self._in_a_row(self._order())
        except ExportError as error:
            if all(self._runs(index) for index in range(len(self.inputs))):
                raise _stuck(eager, error) from error
            self.inputs = [item for index, item in enumerate(self.inputs) if index == 0 or self._runs(index)]
            self._alone.clear()
            self.outputs, self.last = self._in_a_row(self._order())

    def _order(self) -> list[int]:
        count = len(self.inputs)
        return [*range(count), *range(max(count - 1, 1))]

    def alone(self, index: int) -> tuple[Outputs, dict[str, Any]]:
        """Return the outputs of one call, and the values that it changes by path."""
        if index not in self._alone:
            outputs, changes = self._in_a_row([index])
            self._alone[index] = outputs[0], changes
        return self._alone[index]

    def changes(self, *order: int) -> dict[str, Any]:
        """Return the values that calls in a row have changed."""
        return self.alone(order[0])[1] if len(order) == 1 else self._in_a_row(order)[1]

    def _in_a_row(self, order: Sequence[int]) -> tuple[list[Outputs], dict[str, Any]]:
        outputs, changes = self.eager.run_in_a_row([self.inputs[index] for index in order])
        return outputs, {change.path: change.value for change in changes}

    def _runs(self, index: int) -> bool:
        try:
            self.alone(index)
        except ExportError:
            return False
        return True

    def unrepeated(self) -> str | None:
        """Return an output that differs between two calls of the row with the same inputs."""
        order = self._order()
        for later, index in list(enumerate(order))[len(self.inputs) :]:
            if (name := _different(self.outputs[index], self.outputs[later])) is not None:
                return name
        return None

    def influenced(self) -> str | None:
        """Return an output that depends on earlier calls.

        Raises:
            ExportError: the module does not run at some sizes after its first call.
        """
        exact = alike(self.outputs[0], self.alone(0)[0])
        for index, outputs in zip(self._order(), self.outputs, strict=True):
            if (name := _different(self.alone(index)[0], outputs, exact=exact)) is not None:
                return name
        return influenced_at(self.eager, self.examples, self._other_sizes(), exact=exact)

    def _other_sizes(self) -> Iterator[Mapping[str, int]]:
        default = self.examples.default_sizes
        sizes = [dict(sizes) for sizes in self.examples.cases() if sizes != default]
        yield from sizes[-1 : -1 - _OTHER_SIZES : -1]


def influenced_at(eager: Eager, examples: Examples, cases: Iterable[Mapping[str, int]], *, exact: bool) -> str | None:
    """Return an output that depends on a call at other sizes before.

    Args:
        eager: the module.
        examples: makes the inputs.
        cases: the other sizes.
        exact: whether any difference counts, or only one by more than rounding.

    Raises:
        ExportError: the module does not run at some sizes after its first call.
    """
    usual = examples.make(examples.default_sizes)
    alone = eager.run(usual)
    for sizes in cases:
        other = examples.make(sizes)
        try:
            expected = eager.run(other)
        except ExportError:
            continue
        try:
            row = eager.run_in_a_row([usual, other, usual])[0]
        except ExportError as error:
            raise _stuck(eager, error) from error
        for one, another in ((expected, row[1]), (alone, row[2])):
            if (name := _different(one, another, exact=exact)) is not None:
                return name
    return None


def find(calls: Calls) -> Kept:
    """Return the state that a module keeps between calls.

    Raises:
        ExportError: it changes a parameter, or sets values from the inputs of its first call.
    """
    eager = calls.eager
    kinds = _kinds(eager)
    if (name := next((path for path, kind in kinds.items() if kind == PARAMETER), None)) is not None:
        if first := _initialized(calls):
            raise _initializing(first)
        raise ExportError(f"the model changes its parameter {name} while it runs; make it a buffer")
    known = [name for name, _ in eager.module.named_buffers()]
    changed = [path for path, kind in kinds.items() if kind == BUFFER]
    buffers = sorted(changed, key=lambda name: known.index(name) if name in known else len(known))
    filled = _filled(calls, list(kinds))
    if not set(buffers) <= set(filled):
        filled = ()  # with a state, the others may be flags of that state
    changed = [] if filled else buffers
    if changed and changed[-1] not in known:
        if first := _initialized(calls):
            raise _initializing(first)
        raise ExportError(f"the model makes the buffer {changed[-1]} while it runs; register a tensor when it is built")
    scratch = overwritten(eager, changed, calls.inputs[0])
    states = States(
        tuple(name for name in changed if name not in scratch),
        tuple(name for name in eager.arguments.names if name in eager.written),
    )
    return Kept(states, scratch, filled)


def refused(calls: Calls, states: States) -> ExportError:
    """Return the error for states that are not lifted."""
    if states.buffers and (first := _initialized(calls)):
        return _initializing(first)
    return ExportError(
        f"the model changes {', '.join(sorted(states.names))} while it runs, which a served graph would silently "
        "drop; return the new value as an output and accept the old one as an input, or use --lift-state"
    )


def check(calls: Calls, kept: Kept) -> Iterator[str]:
    """Yield remarks on attributes that a module changes. Its states are lifted.

    Raises:
        ParityError: outputs depend on earlier calls, or on random numbers.
        ExportError: the first call sets values from its inputs.
    """
    eager = calls.eager
    attributes = [path for path, kind in _kinds(eager).items() if kind == ATTRIBUTE]
    if not attributes and not kept.filled:
        if (name := calls.unrepeated()) is not None:
            raise ParityError(_random(calls, name))
        return
    name = calls.influenced() or _counted(calls, [path for path in attributes if path not in kept.filled])
    if name is None:
        # Hooks that a model registers in its own modules, as those of transformers do to record outputs, are not state.
        unread = [path for path in attributes if path not in kept.filled and "_hooks[" not in path]
        if unread:
            yield (
                f"the model changes {_listed(unread)} when it is called, which the graph does not; no output "
                f"depended on that in {len(calls.outputs)} calls in a row"
            )
        return
    if first := _initialized(calls):
        raise _initializing(first)
    changing = [path for path in attributes if path not in kept.filled]
    if changing:
        before = getattr(_owner(eager.module, changing[0]), changing[0].rpartition(".")[2], None)
        if torch.is_tensor(value := calls.last.get(changing[0])) and value.shape != getattr(before, "shape", None):
            raise ParityError(
                f"the model's attribute '{changing[0]}' keeps a state between calls, whose size is not known before "
                "the first: accept the state as an input of forward and return its new value"
            )
        raise ParityError(
            f"the model returns different '{name}' for the same input each time; its attribute '{changing[0]}' "
            "changes at each call; register it as a buffer and use --lift-state"
        )
    if kept.filled:
        if advice := remedy(eager, calls.examples, kept.filled):
            raise ExportError(advice)
        raise ParityError(
            f"the model returns different '{name}' for the same input once {_listed(kept.filled)} are filled; compute "
            "them when it is built, or at each call"
        )
    raise ParityError(_random(calls, name))


class Watched:
    """The original in a proof, which compares its calls with those in a row where it changes something new."""

    def __init__(self, eager: Eager, example: Inputs):
        self._eager = eager
        self._example = example
        self._known = {*_kinds(eager), *eager.states.buffers, *eager.scratch}
        self._failure: ParityError | None = None

    def run(self, inputs: Inputs) -> Outputs:
        """Run the module as for the first time."""
        outputs, changes = self._eager.run_in_a_row([inputs])
        new = [change for change in changes if change.path not in self._known]
        if new and self._failure is None:
            self._failure = self._caused_by(new, inputs)
        return outputs[0]

    def _caused_by(self, new: Sequence[Change], inputs: Inputs) -> ParityError | None:
        names = ", ".join(change.path for change in new)
        if any(change.kind != ATTRIBUTE for change in new):
            return _on_some(names)
        later = self._eager.run_in_a_row([inputs, self._example])[0][1]
        if _different(self._eager.run(self._example), later, exact=True) is None:
            return None
        return ParityError(
            f"the model changes its attribute {names} on some inputs only, and then returns something else for others; "
            "return the new value as an output and accept the old one as an input"
        )

    def check(self, *, thorough: bool = False) -> None:
        """Raise ParityError if a call changed a state that is not lifted; ``thorough`` compares large weights too."""
        if thorough and self._eager.snapshot is not None and (changes := self._eager.snapshot.undo(thorough=True)):
            self._failure = self._failure or _on_some(changes[0].path)
        written = self._eager.written - {*self._eager.states.inputs}
        if self._failure is not None:
            raise self._failure
        if written:
            raise _on_some(f"its input {min(written)}")


def _on_some(names: str) -> ParityError:
    return ParityError(
        f"the model changes {names} on some inputs only, which a served graph would silently drop; return the new "
        "value as an output and accept the old one as an input"
    )


def overwritten(eager: Eager, buffers: Sequence[str], inputs: Inputs) -> tuple[str, ...]:
    """Return the changed buffers whose values before a call have no effect on the call.

    The second call counts as well: a flag among the buffers may end the overwriting after the first.
    """

    def call(start: Mapping[str, Any]) -> tuple[Outputs, dict[str, Any]] | None:
        try:
            outputs, changes = eager.run_in_a_row([inputs], start)
        except ExportError:
            return None
        found = {change.path: change.value for change in changes}
        return outputs[0], {name: found.get(name, eager.module.get_buffer(name)) for name in buffers}

    def copies(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in values.items()}

    first = call({}) if buffers else None
    second = None if first is None else call(copies(first[1]))
    if first is None or second is None:
        return ()

    def has_no_effect(names: Sequence[str]) -> bool:
        for start, expected in (({}, first), (first[1], second)):
            others = {name: _other_values(eager.module.get_buffer(name)) for name in names}
            found = call(copies(start) | others)
            if found is None or not alike(found[0], expected[0]):
                return False
            if not all(equal(value, expected[1][name]) for name, value in found[1].items()):
                return False
        return True

    if has_no_effect(buffers):
        return tuple(buffers)
    return tuple(name for name in buffers if len(buffers) > 1 and has_no_effect([name]))


def remedy(eager: Eager, examples: Examples, filled: Sequence[str]) -> str:
    """Return the dynamic dimensions that caches depend on, with a remedy, for a capture that failed; or ''."""
    default = examples.default_sizes

    def at(sizes: Mapping[str, int]) -> dict[str, Any]:
        try:
            changes = eager.run_in_a_row([examples.make(sizes)])[1]
        except ExportError:
            return {}
        return {change.path: change.value for change in changes if change.path in filled}

    usual = at(default)
    found: list[str] = []
    for sizes in examples.cases() if filled else ():
        differing = [dim for dim, size in sizes.items() if size != default[dim]]
        if len(differing) == 1 and differing[0] not in found and (values := at(sizes)):
            found += [] if equal(values, usual) else differing
    if not found:
        return ""
    dims = " and ".join(f"'{dim}'" for dim in found)
    return (
        f"the model keeps {', '.join(filled)} between calls, computed for one size of {dims}: "
        f"declare {dims} as fixed, or let forward compute it at each call"
    )


def _inputs(examples: Examples) -> Iterator[dict[str, Array]]:
    """Yield ordinary inputs, others, and large ones."""
    sizes = examples.default_sizes
    yield examples.make(sizes)
    yield examples.make(sizes, seed=2)
    free = [spec.name for spec in examples.inputs if spec.dtype.is_float and not examples.is_limited(spec.name)]
    large = examples.make(sizes, seed=3)
    if free := [name for name in free if name not in examples.states]:
        yield examples.fitted(large | {name: (large[name] * 1000).astype(large[name].dtype) for name in free})


def _kinds(eager: Eager) -> dict[str, str]:
    """Return the kinds of what calls have changed, by path, without lifted states."""
    changed = {} if eager.snapshot is None else eager.snapshot.changed
    return {path: kind for path, kind in changed.items() if path not in (*eager.states.buffers, *eager.scratch)}


def _filled(calls: Calls, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the paths whose values are the same after any calls."""
    if not paths:
        return ()
    seen = [calls.changes(index) for index in range(len(calls.inputs))] + [calls.last]
    return tuple(
        path for path in paths if all(path in values and equal(values[path], seen[0][path]) for values in seen)
    )


def _initialized(calls: Calls) -> list[str]:
    """Return the paths whose values are those of the first call of a row, and differ by its inputs."""
    if len(calls.inputs) < 2:
        return []
    first, second, before, after = calls.changes(0), calls.changes(1), calls.changes(0, 1), calls.changes(1, 0)
    return [
        path
        for path in first
        if path in second
        and not equal(first[path], second[path])
        and equal(first[path], before.get(path))
        and equal(second[path], after.get(path))
    ]


def _initializing(paths: Sequence[str]) -> ExportError:
    return ExportError(
        f"the model sets {', '.join(sorted(paths))} from the inputs of its first call, so that the graph would hold "
        "the values of an example: call the module once on real inputs before it is exported, for example in the "
        "function that returns it"
    )


def _stuck(eager: Eager, error: ExportError) -> ExportError:
    """Return the error for a module that does not run after other calls."""
    kept = next((path for path, kind in _kinds(eager).items() if kind == ATTRIBUTE), None)
    named = f"attribute '{kept}' keeps a state" if kept else "code keeps a state"
    return ExportError(
        f"the model's {named} between calls, so that it does not run at other sizes after its first call ({error}): "
        "accept the state as an input of forward and return its new value"
    )


def _counted(calls: Calls, paths: Sequence[str]) -> str | None:
    """Return an output that changes with a number that counts calls, once it is large."""
    module = calls.eager.module
    names = [path for path in paths if type(calls.last.get(path)) in (int, float)]
    owned = [path for path in names if hasattr(_owner(module, path), path.rpartition(".")[2])]
    start = {path: calls.last[path] + _MANY_CALLS for path in owned}
    if not start:
        return None
    try:
        outputs = calls.eager.run_in_a_row([calls.inputs[0]], start)[0]
    except ExportError:
        return None
    return _different(calls.alone(0)[0], outputs[0], exact=True)


def _owner(module: torch.nn.Module, path: str) -> object:
    try:
        return module.get_submodule(path.rpartition(".")[0])
    except AttributeError:
        return None


def _random(calls: Calls, name: str) -> str:
    """Return the message for outputs that differ although no attribute or buffer changes."""
    text = f"the model returns different '{name}' for the same input each time"
    if not _remembers(calls):
        return f"{text}; disable its randomness in eval mode, or make its state an input"
    if isinstance(calls.eager.module, torch.jit.ScriptModule):
        return (
            f"{text}: the TorchScript keeps a state between calls, which a graph would drop. Export its source code, "
            "with the state as an input and an output of forward, or an ONNX file of its authors that has them"
        )
    return f"{text}; it keeps a state between calls; register it as a buffer and use --lift-state"


def _remembers(calls: Calls) -> bool:
    """Return whether a model's outputs differ between two calls with the same random numbers."""
    runs = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            runs.append(calls.eager.run(calls.inputs[0]))
    return not alike(*runs)


def _other_values(buffer: torch.Tensor) -> torch.Tensor:
    """Return values that show in any result that is computed with them."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.where(torch.isnan(buffer), 1, math.nan).to(buffer.dtype)
    return ~buffer if buffer.dtype is torch.bool else buffer + 1


def _different(expected: Outputs, actual: Outputs, *, exact: bool = False) -> str | None:
    """Return an output that differs by more than rounding, or at all if ``exact``."""
    for name, value in expected.items():
        allowed = 0 if exact else TOLERANCE.get(DType.of(value), 0.0)
        if name not in actual or arrays.departure(value, actual[name]) > allowed:
            return name
    return None


def alike(left: Outputs, right: Outputs) -> bool:
    """Return whether two calls returned the same values, NaNs included."""
    return left.keys() == right.keys() and all(
        np.array_equal(value, right[name], equal_nan=value.dtype.kind in "fc") for name, value in left.items()
    )


def _listed(paths: Sequence[str]) -> str:
    return f"its {'attribute' if len(paths) == 1 else 'attributes'} {', '.join(paths)}"
