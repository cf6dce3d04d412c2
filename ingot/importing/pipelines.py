"""Pipelines of other servers as lines of ``ingot.toml``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from ingot import foreign
from ingot.config.pipelines import Table, problems
from ingot.errors import InvalidArgument


def lines(called: str, name: str, models: Mapping[str, str], table: Mapping[str, Any]) -> str:
    """Return the lines of a pipeline and its models.

    Args:
        called: its source in messages.
        name: the pipeline's.
        models: the reference of each model by the name under which it is served.
        table: as the file has it: ``inputs``, ``outputs`` and ``nodes``.

    Raises:
        InvalidArgument: it is not a pipeline.
    """
    try:
        parsed = Table.model_validate(table)
    except ValidationError as error:
        raise InvalidArgument(f"{called} cannot become a pipeline: {foreign.first_fault(error)}") from error
    for _, problem in problems(name, parsed):
        raise InvalidArgument(f"{called} cannot become a pipeline: {problem}")
    return "\n".join(_lines(name, models, table))


def _lines(name: str, models: Mapping[str, str], table: Mapping[str, Any]) -> Iterator[str]:
    for model, source in models.items():
        yield from ("[[model]]", f"name = {_value(model)}", f"source = {_value(source)}", "")
    yield from (f"[pipelines.{_key(name)}]", *(f"{key} = {_value(table[key])}" for key in ("inputs", "outputs")))
    for node, fields in table["nodes"].items():
        yield from ("", f"[pipelines.{_key(name)}.nodes.{_key(node)}]")
        yield from (f"{key} = {_value(value)}" for key, value in fields.items())
    yield ""


def _key(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _value(text)


def _value(value: Any) -> str:
    """Return a value in TOML: a text, a list or a table."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)
