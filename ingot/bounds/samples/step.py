"""One node with the flows of its inputs, as rules read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.bounds.abstract import Tensor
from ingot.bounds.flow import SHARED, Flow, Kind, MixingError, mentions
from ingot.bounds.operators.op import Op
from ingot.bounds.poly import ONE, Poly


@dataclass
class Step:
    """A node with its inputs' flows, None for those that are omitted, and bounds of inputs and outputs.

    Bounds are None where nothing is known. ``dim`` is the dimension of samples.
    """

    op: Op
    flows: Sequence[Flow | None]
    outputs: Sequence[Tensor | None]
    dim: str

    def flow(self, index: int) -> Flow:
        """Return the flow of an input; an omitted one is shared."""
        found = self.flows[index] if index < len(self.flows) else None
        return SHARED if found is None else found

    def has(self, index: int) -> bool:
        return index < len(self.flows) and self.flows[index] is not None

    @property
    def batch(self) -> Poly:
        return Poly.symbol(self.dim)

    @property
    def source(self) -> Flow:
        """The flow of the first input, which must have samples where any input has.

        Raises:
            MixingError: another input has samples, and this one has none.
        """
        if not self.flow(0).sampled:
            raise MixingError("the samples are in another input than the first")
        return self.flow(0)

    def size_only(self, *indices: int) -> None:
        """Check that inputs depend at most on the number of samples, as sizes do."""
        self.share(*(index for index in indices if not self.flow(index).counted))

    def share(self, *indices: int) -> None:
        """Check that inputs do not depend on samples, which would set parameters for all of them.

        Raises:
            MixingError: one does.
        """
        for index in indices:
            found = self.flow(index)
            if found.kind is Kind.COUNTED:
                raise MixingError(f"its input {index} depends on the number of samples")
            if found.kind is not Kind.SHARED:
                raise MixingError(f"its input {index}, which applies to all samples, depends on one of them")

    def rank(self, index: int) -> int:
        """Return the rank of an input.

        Raises:
            MixingError: it is unknown.
        """
        flow, tensor = self.flow(index), self.op.get(index)
        if flow.sampled:
            return flow.rank
        if tensor is None or tensor.dims is None:
            raise MixingError(f"the rank of its input {index} is unknown")
        return len(tensor.dims)

    def result_rank(self, index: int = 0) -> int:
        """Return the rank of an output.

        Raises:
            MixingError: it is unknown.
        """
        tensor = self.outputs[index] if index < len(self.outputs) else None
        if tensor is None or tensor.dims is None:
            raise MixingError("the rank of its output is unknown")
        return len(tensor.dims)

    def size(self, index: int, axis: int) -> Poly | None:
        """Return a dimension of an input if it is known exactly."""
        tensor = self.op.get(index)
        return None if tensor is None or tensor.dims is None else tensor.dims[axis].exact

    def counts(self, poly: Poly | None) -> bool:
        """Return whether a size depends on the number of samples, or is unknown."""
        return poly is None or mentions(poly, self.dim)


def broadcast(step: Step, indices: Sequence[int], rank: int | None = None) -> Flow:
    """Return the flow of inputs that are broadcast against each other, aligned at their last dimensions.

    Args:
        step: the node.
        indices: the inputs.
        rank: of the result; by default the largest of the inputs'.

    Raises:
        MixingError: samples meet other samples, their number, or a value of their position.
    """
    given = [index for index in indices if step.has(index)]
    rank = max(map(step.rank, given)) if rank is None else rank
    found: Flow | None = None
    for index in given:
        flow = step.flow(index)
        if flow.counted:
            raise MixingError("it combines samples with their number")
        if not flow.sampled:
            continue
        moved = flow.at(flow.axis + rank - flow.rank, rank)
        if found is not None and found.axis != moved.axis:
            raise MixingError("it combines each sample with all others")
        joined = moved if found is None else found.joined(moved)
        if not joined.sampled:
            raise MixingError("it combines samples in different orders")
        found = joined
    if found is None:
        raise MixingError("no input has samples")
    for index in given:
        axis = found.axis - rank + step.rank(index)
        if not step.flow(index).sampled and axis >= 0:
            size = step.size(index, axis)
            if size is None or size != ONE:
                raise MixingError("it combines samples with values of certain positions in the batch")
    return found
