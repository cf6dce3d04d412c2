"""The fields of a JSON body, with errors that name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ingot.errors import IngotError, InvalidArgument, InvalidField, TooLarge, quoted

Place = Callable[[int | None], str]
"""Returns the field of a body that has an element of an input; without an index the field that has all."""

# Messages about the input of a model begin so.
_INPUT = re.compile(r"(?:element (\d+) of )?input '([^']*)' ")


def listed(name: str) -> Place:
    """Return the places of a field's list."""
    return lambda index: name if index is None else f"{name}[{index}]"


def single(name: str) -> Place:
    """Return the place of a field that has one text."""
    return lambda index: name


def place_of(content: Mapping[str, Any], name: str) -> Place:
    """Return the places of a field that has a text or a list of texts."""
    return single(name) if isinstance(content.get(name), str) else listed(name)


def in_fields(error: IngotError, places: Mapping[str, Place]) -> IngotError:
    """Return an error about a model's input as one about the field that has it.

    Args:
        error: of a model.
        places: the places of inputs, by name.
    """
    found = _INPUT.match(str(error))
    if found is None or (place := places.get(found[2])) is None or type(error) not in (InvalidArgument, TooLarge):
        return error
    field, message = place(None if found[1] is None else int(found[1])), str(error)[found.end() :]
    return InvalidField(field, message) if type(error) is InvalidArgument else TooLarge(f"'{field}' {message}")


def at_root(content: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a body with its parameters of these names at the root, where clients may send them too.

    Raises:
        InvalidField: the parameters are not an object, or one has another name or is at the root too.
    """
    found = dict(content)
    parameters = found.pop("parameters", None)
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict):
        raise InvalidField("parameters", f"is {quoted(parameters)}; it must be an object")
    for name in parameters:
        if name not in names:
            raise InvalidField(f"parameters.{name}", "is not a parameter of this task; leave it out")
        if name in found:
            raise InvalidField(f"parameters.{name}", "is also at the root; leave one of them out")
    return {**found, **parameters}


class Fields:
    """The fields of an object, each of which is read once. :meth:`end` refuses those that were not read.

    Args:
        content: the object.
        where: the name of the field that has it, for messages; empty for the body.
    """

    def __init__(self, content: Mapping[str, Any], where: str = ""):
        self._left = dict(content)
        self.where = f"{where}." if where else ""

    def any(self, name: str) -> Any:
        """Return a field; None if it is missing or null."""
        return self._left.pop(name, None)

    def rest(self) -> dict[str, Any]:
        """Return the fields that were not read."""
        return dict(self._left)

    def nested(self, name: str) -> Fields:
        """Return the fields of an object; none if it is missing or null."""
        value = self.any(name)
        if value is None:
            return Fields({}, name)
        if not isinstance(value, dict):
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be an object")
        return Fields(value, name)

    def text(self, name: str, default: str | None = None, among: Sequence[str] = ()) -> str:
        """Return a text.

        Args:
            name: of the field.
            default: for a field that is missing or null; None if the field is needed.
            among: the texts that are known; empty for any.

        Raises:
            InvalidField: it is missing, not a text, or unknown.
        """
        value = self._value(name, default)
        if not isinstance(value, str):
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be a text")
        if among and value not in among:
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be one of: {', '.join(among)}")
        return value

    def flag(self, name: str) -> bool | None:
        """Return true or false; None if it is missing or null.

        Raises:
            InvalidField: it is neither.
        """
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be true or false")
        return value

    def count(self, name: str, default: int = 0, most: int | None = None) -> int:
        """Return a whole number of 1 or more, up to ``most``, or the default.

        Raises:
            InvalidField: it is something else.
        """
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
            wanted = "of 1 or more" if most is None else f"from 1 to {most}"
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be a whole number {wanted}")
        return value

    def number(self, name: str) -> float | None:
        """Return a number; None if it is missing or null.

        Raises:
            InvalidField: it is something else.
        """
        value = self.any(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be a number")
        return value

    def whole(self, name: str) -> int | None:
        """Return a whole number of any sign; None if it is missing or null.

        Raises:
            InvalidField: it is something else.
        """
        value = self.any(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidField(self.where + name, f"is {quoted(value)}; it must be a whole number")
        return value

    def neutral(self, accepted: Mapping[str, Sequence[Any]]) -> None:
        """Accept the values of fields that change nothing, and no others.

        Args:
            accepted: the values of each field; null is accepted too.

        Raises:
            InvalidField: a field has another value.
        """
        for name, values in accepted.items():
            value = self.any(name)
            if value is not None and not any(type(value) is type(each) and value == each for each in values):
                known = " or ".join(map(quoted, values)) or "null"
                why = f"is {quoted(value)}; this server supports {known} only, so leave it out"
                raise InvalidField(self.where + name, why)

    def texts(self, name: str, most: int) -> list[str]:
        """Return a list of texts, ``most`` at most; one text is a list of one.

        Raises:
            InvalidField: it is missing, empty or too long, or has something else than texts.
        """
        return texts_of(self.where + name, self._value(name, None), most)

    def end(self) -> None:
        """Refuse fields that were not read.

        Raises:
            InvalidField: there is one.
        """
        for name in self._left:
            raise InvalidField(self.where + name, "is not a field that this server knows; leave it out")

    def _value(self, name: str, default: object) -> Any:
        value = self.any(name)
        value = default if value is None else value
        if value is None:
            raise InvalidField(self.where + name, "is missing")
        return value


def check_count(name: str, value: object, most: int) -> None:
    """Refuse a list that is too long before its items are looked at, in the event loop.

    Raises:
        InvalidField: it has more than ``most`` items.
    """
    if isinstance(value, list) and len(value) > most:
        raise InvalidField(name, f"has {len(value)} items, over the limit of {most}; divide the request")


def texts_of(name: str, value: object, most: int) -> list[str]:
    """Return a text, or a list of texts, as a list.

    Raises:
        InvalidField: it is empty or has more than ``most`` items, or has something else than texts.
    """
    values = [value] if isinstance(value, str) else value
    check_count(name, values, most)
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise InvalidField(name, "must be a text or a list of texts")
    if not values:
        raise InvalidField(name, "is an empty list; send one text or more")
    return values
