"""Steps that decode each item of a request by itself, such as pictures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ingot.errors import IngotError, InvalidArgument
from ingot.steps.step import Apply, Files, Step, Values
from ingot.tensors import Array

Item = Callable[[bytes], Values]
"""Returns the named values of one item; the text of an error completes "element 3 of input 'image' ...". Immutable."""
Map = Callable[[Callable[[Any], Values], Iterable[Any]], Iterable[Values]]
"""Calls a function with each element, in any number of threads; the results keep the order."""


def binary(content: bytes, starts: tuple[bytes, ...]) -> bytes:
    """Return the bytes of a file that may be sent as text, in base64 or as a ``data:`` URL: JSON has no other form.

    Args:
        content: what was sent.
        starts: how base64 of each format begins, which no file of a format does.

    Raises:
        InvalidArgument: the base64 is not valid.
    """
    if content.startswith(b"data:"):
        content = content.partition(b",")[2]
    elif not content.startswith(starts):
        return content
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise InvalidArgument(f"is base64 that is not valid: {error}") from error


class ItemStep(Step):
    """A step from a BYTES input, whose elements are files, to tensors with the values of each.

    Decoders are native code on bytes from clients. A server therefore runs :meth:`item` in confined processes, unless a
    kind is not ``confined``, as it decodes nothing.
    """

    confined: ClassVar[bool] = True
    accepts_empty: ClassVar[bool] = False
    """Whether a file may have no bytes."""
    media_type: ClassVar[str] = ""
    """The media types of its files, such as ``image/*``; empty for any."""

    def item(self) -> Item:
        """Return the function of one item, once all that it imports is imported.

        Raises:
            Unsupported: a package is missing.
        """
        raise NotImplementedError

    @property
    def media(self) -> Mapping[str, str]:
        return dict.fromkeys(self.reads, self.media_type)

    @property
    def memory_mb(self) -> int:
        """Private memory that a process needs for the largest item, in MiB."""
        raise NotImplementedError

    def open(self, files: Files) -> Apply:
        return self.over(self.item(), map)

    def over(self, item: Item, all_of: Map) -> Apply:
        """Return the step that gets the values of items from ``item``, which ``all_of`` calls."""
        [source] = self.reads

        def named(numbered: tuple[int, object]) -> Values:
            index, content = numbered
            name = f"element {index} of input '{source}'"
            if not isinstance(content, bytes):
                raise InvalidArgument(f"{name} is a {type(content).__name__}, not the bytes of a file")
            if not content and not self.accepts_empty:
                raise InvalidArgument(f"{name} is empty: send the bytes of a file")
            try:
                return item(content)
            except IngotError as error:
                raise type(error)(f"{name} {error}") from error

        def apply(values: Values) -> Values:
            return self.joined([*all_of(named, enumerate(values[source].reshape(-1).tolist()))])

        return apply

    def joined(self, found: Sequence[Values]) -> Values:
        """Return the values of all items of a request, with one row for each.

        Raises:
            InvalidArgument: they have different shapes.
        """
        return {name: self._stacked([each[name] for each in found]) for name in found[0]}

    def _stacked(self, rows: Sequence[Array]) -> Array:
        if len({each.shape for each in rows}) > 1:
            shapes = ", ".join(sorted({str([*each.shape]) for each in rows}))
            raise InvalidArgument(
                f"the elements of input '{self.reads[0]}' have the shapes {shapes} after step '{self.kind}': send one "
                "in each request"
            )
        return np.stack(rows)
