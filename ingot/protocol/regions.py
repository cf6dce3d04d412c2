"""Where a request's tensors are, and what it wants of its outputs: the parameters of two of Triton's extensions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ingot.errors import InvalidArgument, Unsupported, quoted
from ingot.tensors import DType

_REGION, _OFFSET, _SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
CLASSES = "classification"
"""The parameter of an output, or of a request, with the number of classes that are wanted instead of values."""
EXTRA = frozenset((_REGION, _OFFSET, _SIZE, CLASSES))
"""The parameters of tensors that this module reads."""

OFF = "this server has no shared memory with its clients; --shared-memory turns it on"


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in a region of shared memory; ``offset`` and ``size`` are in bytes."""

    region: str
    offset: int
    size: int

    @classmethod
    def of(cls, where: str, parameters: Mapping[str, Any]) -> Place | None:
        """Return the place that a tensor's parameters name, or None.

        Args:
            where: names the tensor in errors.
            parameters: of the tensor.

        Raises:
            InvalidArgument: they are not complete, or not of the right types.
        """
        region = parameters.get(_REGION)
        if region is None:
            if _SIZE in parameters or _OFFSET in parameters:
                raise InvalidArgument(f"{where} has a place in shared memory, but no '{_REGION}'")
            return None
        if not isinstance(region, str) or not region:
            raise InvalidArgument(f"'{_REGION}' of {where} must be the name of a region")
        return cls(region, _bytes(where, parameters, _OFFSET, 0), _bytes(where, parameters, _SIZE, None))

    def check_room(self, where: str, nbytes: int) -> None:
        """Refuse a tensor that is larger than its place.

        Raises:
            InvalidArgument: it is.
        """
        if nbytes > self.size:
            raise InvalidArgument(f"{where} has {nbytes} bytes, and '{_SIZE}' provides {self.size}")

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of an output in a response."""
        offset = {_OFFSET: self.offset} if self.offset else {}
        return {_REGION: self.region, **offset, _SIZE: self.size}


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an output is returned other than by its values: its best classes, or the values in a region."""

    classes: int = 0
    place: Place | None = None

    @classmethod
    def of(cls, where: str, parameters: Mapping[str, Any]) -> Delivery | None:
        """Return the delivery that an output's parameters ask for, or None for its values.

        Raises:
            InvalidArgument: the parameters are not complete, not of the right types, or contradict each other.
        """
        place, classes = Place.of(where, parameters), parameters.get(CLASSES, 0)
        if isinstance(classes, bool) or not isinstance(classes, int) or classes < 0:
            raise InvalidArgument(f"'{CLASSES}' of {where} is {str(classes)[:100]}; it must be a number of classes")
        if classes and place is not None:
            raise InvalidArgument(f"{where} is to have classes, which cannot be written to shared memory")
        return cls(classes, place) if classes or place is not None else None


ALL = ""
"""The name under which :func:`deliveries` has what is wanted of the outputs without an entry."""


def deliveries(parameters: Mapping[str, Any], by_name: Mapping[str, Delivery]) -> Mapping[str, Delivery]:
    """Return the delivery of each output, by name; outputs not named follow the request's ``classification``.

    Triton has this parameter for outputs only; clients that cannot give parameters to outputs send it here.

    Raises:
        InvalidArgument: the parameter is wrong.
    """
    delivery = Delivery.of("the request", {CLASSES: parameters[CLASSES]})
    return by_name if delivery is None else {ALL: delivery, **by_name}


Read = Callable[[str, Place, DType, tuple[int, ...]], Any]
"""Returns a tensor, from its name, place, datatype and shape: an array, or one in a GPU's memory."""

Reader = Callable[[Hashable], Read]
"""Returns how the inputs of one request of a client are read."""


def refuse(name: str, place: Place, dtype: DType, shape: tuple[int, ...]) -> NoReturn:
    """Refuse a tensor in shared memory.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(f"tensor '{name}' is in shared memory, but {OFF}")


def _bytes(where: str, parameters: Mapping[str, Any], name: str, default: int | None) -> int:
    value = parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"'{name}' of {where} is {quoted(value)}; it must be a number of bytes")
    return value
