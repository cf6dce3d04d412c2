"""What a request wants of its outputs instead of their values: the best classes, or the values in shared memory."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ingot.errors import InvalidArgument, TooLarge, Unsupported
from ingot.protocol.regions import ALL, OFF, Delivery, Place
from ingot.runtime.gpu.array import Target
from ingot.server.triton.cuda_memory import CudaRegion
from ingot.server.triton.shared_memory import Region, SharedMemory
from ingot.tensors import Array, DType, TensorSpec, arrays

# Most texts of classes in an answer: three times the classes of the largest image data sets.
_MOST_TEXTS = 1 << 16
# Elements of outputs that are handled in the event loop, for up to some milliseconds.
AT_ONCE = 1 << 15


class _Target(NamedTuple):
    where: str
    region: Region | CudaRegion
    place: Place
    direct: Target | None


class Deliveries:
    """The deliveries of one request.

    Args:
        wanted: by the name of the output.
        outputs: the outputs that the request names.
        batch: the symbol of the batch dimension, if the model has one.
        memory: the regions; None if there are none.
        client: who sends the request.
        labels: the names of classes.

    Attributes:
        outputs: those that the response has: classes are texts.

    Raises:
        InvalidArgument: an output has no classes, or its place is not in a registered region.
        Unsupported: the server has no shared memory.
    """

    def __init__(
        self,
        wanted: Mapping[str, Delivery],
        outputs: tuple[TensorSpec, ...],
        batch: str | None,
        memory: SharedMemory | None,
        client: Hashable,
        labels: Sequence[str] = (),
    ):
        self._labels = labels
        self.placed = {name: delivery.place.parameters for name, delivery in wanted.items() if delivery.place}
        self._classes: dict[str, tuple[int, bool]] = {}
        self._targets: dict[str, _Target] = {}
        specs = []
        for spec in outputs:
            delivery, where = wanted.get(spec.name) or wanted.get(ALL, Delivery()), f"output '{spec.name}'"
            if delivery.classes:
                if spec.dtype in (DType.BYTES, DType.BOOL):
                    raise InvalidArgument(f"{where} is {spec.dtype.value}; only numbers have classes")
                self._classes[spec.name] = delivery.classes, spec.axis(batch) == 0
                specs.append(TensorSpec(spec.name, DType.BYTES, ("classes",)))
                continue
            if delivery.place is not None:
                if memory is None:
                    raise Unsupported(f"{where} is to be written to shared memory, but {OFF}")
                region = memory.find(client, where, delivery.place)
                direct = region.target(delivery.place) if isinstance(region, CudaRegion) else None
                self._targets[spec.name] = _Target(where, region, delivery.place, direct)
            specs.append(spec)
        self.outputs = tuple(specs)

    def targets(self, devices: Mapping[str, str]) -> dict[str, Target]:
        """Return the places on devices that an engine can copy outputs to.

        Args:
            devices: on which it has outputs, by their names.
        """
        direct = {name: target.direct for name, target in self._targets.items()}
        return {
            name: target
            for name, target in direct.items()
            if target is not None and target.device.name == devices.get(name)
        }

    def deliver(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the response's arrays, and write those that have a place in shared memory and are not there yet.

        Raises:
            InvalidArgument: an output does not fit into its place.
            TooLarge: the classes would be too many.
        """
        found = dict(outputs)
        for name, (count, batched) in self._classes.items():
            found[name] = best_classes(name, outputs[name], count, self._labels, batched=batched)
        for name, target in self._targets.items():
            if target.direct is None or not target.direct.done:
                target.region.write(target.where, target.place, arrays.to_bytes(outputs[name]))
        return found


def best_classes(name: str, values: Array, count: int, labels: Sequence[str] = (), *, batched: bool) -> Array:
    """Return the indexes of the highest values with these, as texts ``VALUE:INDEX[:LABEL]`` in Triton's format.

    Args:
        name: the output's name.
        values: [batch, ...] or [...]; all dimensions behind the batch are one list of classes.
        count: of classes that are wanted; fewer if there are fewer.
        labels: the names of classes; not used if there are fewer than classes, which would be those of another output.
        batched: whether the first dimension is the batch.

    Returns:
        BYTES, [batch, count] or [count], in descending order of values; of equal values the first index comes first.

    Raises:
        TooLarge: the texts would be too many.
    """
    rows = values.reshape(len(values), math.prod(values.shape[1:])) if batched else values.reshape(1, -1)
    if rows.dtype.kind not in "iuf" or rows.dtype == np.float16:  # bfloat16 has numpy's kind V
        rows = rows.astype(np.float32)
    count = min(count, rows.shape[1])
    if count * len(rows) > _MOST_TEXTS:
        raise TooLarge(f"{count * len(rows)} classes of output '{name}' are wanted, over the limit of {_MOST_TEXTS}")
    last = rows.shape[1] - 1
    labels = labels if len(labels) > last else ()
    keys = np.where(np.isnan(rows), -np.inf, rows) if rows.dtype.kind == "f" else rows
    form = "%f:%d" if rows.dtype.kind == "f" else "%d:%d"  # std::to_string
    texts = np.empty((len(rows), count), object)
    for index in range(len(rows)):
        # A stable ascending order of the reversed values, from its end: of equal values the first comes first.
        order = last - np.argsort(keys[index, ::-1], kind="stable")[::-1][:count]
        texts[index] = [
            (form % (rows[index, place], place) + (f":{labels[place]}" if labels else "")).encode()
            for place in order.tolist()
        ]
    return texts if batched else texts.reshape(-1)
