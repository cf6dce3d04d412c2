"""Answers of which each item has its own number, as arrays."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np

from ingot.steps.ragged import columns, padded

CORNERS = np.dtype((np.float32, 2))


def test_each_type_has_its_padding() -> None:
    rows: list[list[tuple[Any, ...]]] = [[(b"a\0", 0.5, 3, [1, 2])], [], [(b"b", 1, 0, [3, 4]), (b"", 0, 4, [5, 6])]]
    types: dict[str, Any] = {"text": object, "score": np.float32, "start": np.int32, "box": CORNERS}
    parts: dict[str, tuple[Any, Any]] = {name: (itemgetter(place), types[name]) for place, name in enumerate(types)}
    found = columns(rows, parts, "number")
    assert found["text"].tolist() == [[b"a\0", b""], [b"", b""], [b"b", b""]]
    assert found["score"].tolist() == [[0.5, 0], [0, 0], [1, 0]]
    assert found["start"].tolist() == [[3, -1], [-1, -1], [0, 4]]
    assert found["box"].tolist() == [[[1, 2], [0, 0]], [[0, 0], [0, 0]], [[3, 4], [5, 6]]]
    assert found["number"].tolist() == [1, 0, 2]
    assert {name: found[name].dtype for name in types} == {**types, "text": np.dtype(object), "box": np.float32}


def test_items_without_any_answer_keep_the_other_dimensions() -> None:
    assert padded([[], []], CORNERS).shape == (2, 0, 2)
    assert padded([], np.int64).shape == (0, 0)
