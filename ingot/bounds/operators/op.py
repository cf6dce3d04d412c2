"""One operator with the bounds of its inputs, as rules read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingot.bounds.abstract import Dims, Tensor, UnboundedError
from ingot.bounds.graph import Graph, Node
from ingot.bounds.interval import Interval
from ingot.bounds.poly import ZERO, Poly


@dataclass
class Op:
    """A node, the bounds of its inputs, and the results of its rule other than the outputs.

    ``inputs`` has None for omitted inputs. ``maker(name)`` returns the node that computed a tensor, and
    ``tensor(name)`` the tensor's bounds; None if unknown. ``run`` analyses a graph of an attribute, given its inputs
    and how often it runs, and returns its outputs and its peak in bytes. ``workspace`` is the memory in bytes that the
    operator needs while it runs besides inputs and outputs.
    """

    node: Node
    inputs: Sequence[Tensor | None]
    opset: int
    maker: Callable[[str], Node | None]
    tensor: Callable[[str], Tensor | None]
    run: Callable[[Graph, Sequence[Tensor], Poly], tuple[list[Tensor], Poly]]
    workspace: Poly = ZERO

    def __getitem__(self, index: int) -> Tensor:
        """Return an input.

        Raises:
            UnboundedError: it is omitted.
        """
        found = self.get(index)
        if found is None:
            raise UnboundedError(f"its input {index} is missing")
        return found

    def get(self, index: int) -> Tensor | None:
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def given(self) -> list[Tensor]:
        """The inputs that are not omitted."""
        return [tensor for tensor in self.inputs if tensor is not None]

    @property
    def outputs(self) -> int:
        return len(self.node.outputs)

    def has(self, name: str) -> bool:
        return name in self.node.attributes

    def integer(self, name: str, default: int = 0) -> int:
        return self.node.attributes[name].integer if self.has(name) else default

    def integers(self, name: str, default: Sequence[int] = ()) -> list[int]:
        return self.node.attributes[name].integers if self.has(name) else list(default)

    def number(self, name: str, default: float = 0.0) -> float:
        return self.node.attributes[name].number if self.has(name) else default

    def text(self, name: str, default: str = "") -> str:
        return self.node.attributes[name].text if self.has(name) else default

    def axis(self, rank: int, default: int = 0, name: str = "axis") -> int:
        """Return an axis from 0 to ``rank`` - 1.

        Raises:
            UnboundedError: the attribute names no axis.
        """
        found = self.integer(name, default)
        if not -rank <= found < rank:
            raise UnboundedError(f"its axis {found} is not one of {rank} dimensions")
        return found % rank

    def values(self, index: int, name: str) -> tuple[Interval, ...] | None:
        """Return the values of an input or, in older versions of operators, of an attribute; None if unknown."""
        if self.get(index) is not None:
            return self[index].listed()
        return tuple(map(Interval.exactly, self.integers(name))) if self.has(name) else None

    def given_at(self, index: int, name: str) -> bool:
        return self.get(index) is not None or self.has(name)


Rule = Callable[[Op], list[Tensor]]


def never_empty(dims: Sequence[Interval]) -> bool:
    """Return whether all sizes are certainly at least 1."""
    return all(dim.positive for dim in dims)


def refuse_empty(dims: Sequence[Interval]) -> None:
    """Refuse a tensor that may be empty, for operators whose kernel crashes on one.

    Raises:
        UnboundedError: a size may be 0.
    """
    if not never_empty(dims):
        raise UnboundedError(
            "an empty input ends the process; declare that sizes are at least 1: --input 'NAME:float32[seq=1..]'"
        )


def sizes(dims: Dims) -> list[Poly]:
    """Return the upper bounds of dimensions."""
    return [dim.high or ZERO for dim in dims]
