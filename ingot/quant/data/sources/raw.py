"""Raw data of a model with steps as rows of its graph: texts in CSV or JSON Lines, and folders of files by class."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import IngotError, InvalidArgument, quoted
from ingot.quant.data.sources.collect import Source
from ingot.quant.data.sources.items import LABELS
from ingot.steps import ItemStep, OpenedSteps
from ingot.steps.after.classify import Classify
from ingot.tensors import Array

SUFFIXES = (".csv", ".jsonl", ".ndjson")
PAIRS = "pairs"
"""The extra with the number of the pair that a row is one text of."""
_LABEL, _PAIR = "label", "text_pair"


def open_table(path: Path, steps: OpenedSteps, limit: int) -> Source:
    """Return the rows of a CSV file with a header, or of JSON Lines: a column for each raw input, and ``label``.

    For a model of single texts, a column ``text_pair`` makes two rows of each line, whose score is the label.

    Raises:
        InvalidArgument: the file cannot be read, or lacks the column of a raw input.
    """
    records = list(_records(path))
    if not records:
        raise InvalidArgument(f"{path} has no rows")
    kept, notes = _spread(records, limit, "rows")
    return Source(_rows(steps, kept), f" in {path}", bounded=True, notes=notes, classes=_labels(steps), raw=True)


def open_folder(folder: Path, steps: OpenedSteps, limit: int) -> Source | None:
    """Return the files below a folder, with the names of its folders as labels; None if the model accepts no files.

    Raises:
        InvalidArgument: there are no files.
    """
    step = next((step for step in steps.config.before if isinstance(step, ItemStep)), None)
    if step is None:
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    if not files:
        raise InvalidArgument(f"{folder} has no files")
    by_class = all(path.parent != folder for path in files)
    kept, notes = _spread(files, limit, "files")
    [name] = step.reads
    records = (_record(path, name, path.relative_to(folder).parts[0] if by_class else None) for path in kept)
    return Source(_rows(steps, records), f" in {folder}", bounded=True, notes=notes, classes=_labels(steps), raw=True)


_Record = tuple[str, Mapping[str, Any]]
"""The place of a record for messages, and its columns."""


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _record(path: Path, name: str, label: str | None) -> _Record:
    try:
        return f"{path}", {name: path.read_bytes(), **({} if label is None else {_LABEL: label})}
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error


def _records(path: Path) -> Iterator[_Record]:
    """Yield the rows of a table.

    Raises:
        InvalidArgument: it is not UTF-8, or a line is not a JSON object, or has more or fewer fields than the header.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            if path.suffix.lower() == ".csv":
                for row in (reader := csv.DictReader(file, strict=True)):
                    place = f"line {reader.line_num} of {path}"
                    if None in row or None in row.values():
                        raise InvalidArgument(f"{place} has more or fewer fields than the header")
                    yield place, row
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"line {number} of {path}", _object(line, number, path)
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}; save it as UTF-8") from error


def _object(line: str, number: int, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"line {number} of {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"line {number} of {path} is a {type(found).__name__}, not an object")
    return found


def _spread(items: Sequence[Any], limit: int, what: str) -> tuple[list[Any], tuple[str, ...]]:
    """Return at most ``limit`` items, evenly spaced and in random order, so that all classes are among the first."""
    count = min(limit, len(items))
    notes = () if count == len(items) else (f"{count} of the {len(items)} {what} were read, evenly spaced",)
    order = np.random.default_rng(0).permutation(count)
    return [items[int(index) * len(items) // count] for index in order], notes


def _rows(steps: OpenedSteps, records: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of each record, with its label and what the steps after the graph need."""
    kept = _kept(steps)
    for number, (place, record) in enumerate(records):
        for raw, extras in _split(steps, place, record, number):
            try:
                steps.check(raw)
                values = steps.prepare(raw)
            except IngotError as error:
                raise InvalidArgument(f"{place}: {error}") from error
            yield place, {**steps.tensors(values), **{name: values[name] for name in kept if name in values}, **extras}


def _kept(steps: OpenedSteps) -> list[str]:
    """Return the values of steps before the graph, other than its inputs, that answers are made of."""
    config, graph = steps.config, {spec.name for spec in (*steps.signature.inputs, *steps.signature.outputs)}
    needed = [name for step in config.after for name in step.reads] + [spec.name for spec in config.outputs]
    made = {name for step in config.before for name in step.writes}
    return [name for name in dict.fromkeys(needed) if name in made - graph]


def _split(
    steps: OpenedSteps, place: str, record: Mapping[str, Any], number: int
) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Yield the raw inputs and the extras of a record: two for a pair of texts of a model of single texts."""
    config = steps.config
    named = {spec.name for spec in config.inputs}
    for name in named - set(config.optional):
        if record.get(name) is None:
            columns = ", ".join(record)
            raise InvalidArgument(f"{place} has no '{name}', a raw input of the model; its columns are: {columns}")
    raw = {name: _element(place, name, record[name]) for name in named if record.get(name) not in (None, "")}
    raw |= {name: _element(place, name, record[name]) for name in named - set(config.optional)}
    label = record.get(_LABEL)
    extras = {} if label is None else {LABELS: _label(steps, place, label)}
    if _PAIR in named or record.get(_PAIR) is None:
        yield raw, extras
        return
    extras[PAIRS] = np.array([number])
    yield raw, extras
    [first, *_] = [spec.name for spec in config.inputs if spec.name not in config.optional]
    yield {**raw, first: _element(place, _PAIR, record[_PAIR])}, extras


def _element(place: str, name: str, value: Any) -> Array:
    if not isinstance(value, str | bytes):
        raise InvalidArgument(f"{place}: '{name}' is {quoted(value)}, not a text")
    found = np.empty(1, object)
    found[0] = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    return found


def _labels(steps: OpenedSteps) -> tuple[str, ...]:
    return next((step.labels for step in steps.config.after if isinstance(step, Classify)), ())


def _label(steps: OpenedSteps, place: str, value: Any) -> Array:
    """Return a label as a number: of a class if the model has names of classes, otherwise as it is.

    Raises:
        InvalidArgument: it is neither the name nor the number of a class, or not a number.
    """
    names, text = _labels(steps), str(value).strip()
    if text in names:
        return np.array([names.index(text)])
    try:
        number = float(text)
    except ValueError:
        number = np.nan
    if names and number in range(len(names)):
        return np.array([int(number)])
    if names or not np.isfinite(number):
        known = f"the model's labels are: {', '.join(names[:20])}" if names else "the label must be a number"
        raise InvalidArgument(f"{place} has the label {quoted(value)}; {known}")
    return np.array([number])
