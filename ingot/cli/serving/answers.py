"""The answers of models with steps, as lines for people."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ingot.tasks import form_of

if TYPE_CHECKING:
    from ingot.tensors import Array

    Lines = Callable[[Mapping[str, Array]], list[str]]


def lines_of(outputs: Mapping[str, Array]) -> list[str] | None:
    """Return lines with the answers to each item; None if the outputs have no form that is known here."""
    lines = LINES.get(form_of({name: array.ndim for name, array in outputs.items()}))
    return None if lines is None else lines(outputs)


def _classes(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line with the labels and scores of each item, best first."""
    rows = zip(outputs["label"].tolist(), outputs["score"].tolist(), strict=True)
    return ["   ".join(f"{_text(name)} {value:.3f}" for name, value in zip(*row, strict=True)) for row in rows]


def _boxes(outputs: Mapping[str, Array]) -> list[str]:
    """Return a table of the boxes, with corners in pixels of the picture."""
    polygons = "polygon" in outputs
    titles = ("top left", "top right", "bottom right", "bottom left") if polygons else _SIDES
    rows: list[tuple[str, ...]] = [("label", "score", *titles)]
    for index, place in _places(outputs):
        if polygons:
            corners = [f"{x},{y}" for x, y in outputs["polygon"][index, place].tolist()]
        else:
            corners = [f"{value:.0f}" for value in outputs["box"][index, place].tolist()]
        label = f"{_of(outputs, index)}{_text(outputs['label'][index, place])}"
        rows.append((label, f"{outputs['score'][index, place]:.3f}", *corners))
    if len(rows) == 1:
        return ["no boxes"]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    padded = ((row[0].ljust(first), *map(str.rjust, row[1:], others)) for row in rows)
    return ["  ".join(row) for row in padded]


def _masks(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line for each mask: its label, its score if it has one, and the size of its PNG."""
    places = _places(outputs)
    width = max((len(outputs["label"][place]) for place in places), default=0)
    lines = []
    for index, place in places:
        score = outputs["score"][index, place] if "score" in outputs else 0
        name = f"{_of(outputs, index)}{_text(outputs['label'][index, place]):{width}}"
        score = f"  {score:.3f}" if score else ""
        lines.append(f"{name}{score}  a mask of {_size(outputs['mask'][index, place])} pixels")
    return lines or ["no segments"]


def _depths(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line for each picture: its least and its largest depth, and the size of its PNG."""
    lines = []
    for index, (height, width) in enumerate(outputs["original_size"].tolist()):
        own = outputs["predicted_depth"][index, :height, :width]
        number = f"{index}: " if len(outputs["depth"]) > 1 else ""
        lines.append(f"{number}depths from {own.min():.4g} to {own.max():.4g}, drawn in {width} x {height} pixels")
    return lines


def _size(png: bytes) -> str:
    return " x ".join(map(str, struct.unpack_from(">2I", png, 16)))  # of the PNG's head


def _entities(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line for each entity: its name, score and words, and where it is in the text."""
    lines = []
    for index, place in _places(outputs):
        label, word, score, start, end = (outputs[name][index, place] for name in _ENTITY)
        lines.append(f"{_of(outputs, index)}{_text(label):12} {score:.3f}   {_text(word)}   [{start}:{end}]")
    return lines or ["no entities"]


def _answers(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line for each answer, best first."""
    lines = []
    for index, place in _places(outputs):
        answer, score, start, end = (outputs[name][index, place] for name in _ANSWER)
        lines.append(f"{_of(outputs, index)}{score:.3f}   {_text(answer)}   [{start}:{end}]")
    return lines or ["no answers"]


def _words(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line with the words of each mask, best first; padding has the token -1."""
    lines = []
    for index, place in _places(outputs):
        row = zip(*(outputs[name][index, place].tolist() for name in _WORD), strict=True)
        best = "   ".join(f"{_text(word)} {score:.3f}" for token, word, score in row if token >= 0)
        lines.append(f"{_of(outputs, index)}{best}")
    return lines


def _transcripts(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line with the text of each sound, after its number and length if there are several."""
    texts, seconds = outputs["text"].tolist(), outputs["seconds"].tolist()
    if len(texts) == 1:
        return [_text(texts[0])]
    return [
        f"{index}: {length:.1f} s   {_text(text)}"
        for index, (text, length) in enumerate(zip(texts, seconds, strict=True))
    ]


def _lines(outputs: Mapping[str, Array]) -> list[str]:
    """Return a line with the score and the text of each line in a picture."""
    return [
        f"{score:.3f}   {_text(text)}"
        for text, score in zip(outputs["text"].tolist(), outputs["score"].tolist(), strict=True)
    ]


def _places(outputs: Mapping[str, Array]) -> list[tuple[int, int]]:
    """Return the indices of each answer; padding has none."""
    return [(index, place) for index, count in enumerate(outputs["count"].tolist()) for place in range(count)]


def _of(outputs: Mapping[str, Array], index: int) -> str:
    """Return the number of the item, if there are several."""
    return f"{index}: " if len(outputs["count"]) > 1 else ""


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


_SIDES = ("left", "top", "right", "bottom")
_ENTITY, _ANSWER = ("entity", "word", "score", "start", "end"), ("answer", "score", "start", "end")
_WORD = ("token", "token_str", "score")
LINES: Mapping[str, Lines] = {
    "boxes": _boxes,
    "masks": _masks,
    "depths": _depths,
    "classes": _classes,
    "entities": _entities,
    "spans": _answers,
    "words": _words,
    "transcripts": _transcripts,
    "lines": _lines,
}
"""The lines of each form of :data:`ingot.tasks.FORMS`."""
