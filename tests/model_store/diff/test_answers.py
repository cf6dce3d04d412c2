"""Final answers of two variants side by side."""

from __future__ import annotations

import numpy as np

from ingot.model_store import Golden
from ingot.model_store.diff.answers import agreement
from ingot.steps import Values
from ingot.steps.ragged import counts, padded


def entities(*rows: list[bytes]) -> Values:
    """Return the entities of each text, padded to the most of a text."""
    return {
        "entity": padded(rows, object),
        "start": padded([[3] * len(row) for row in rows], np.int32),
        "count": counts(rows),
    }


def test_padding_to_the_answers_of_other_items_is_no_difference() -> None:
    raw = {"text": np.array([b"one", b"two"], object)}
    before, after = (
        Golden({}, {}, raw, dict(answers)) for answers in (entities([b"A"], [b"B", b"C"]), entities([b"A"], [b"B"]))
    )
    [note] = agreement([before], [after])
    assert "'entity' is the same for 2 of 2 items" in note  # the first of each
    assert "'start' is the same for 1 of 2 items" in note
    assert "'count' differs by up to 1.0e+00" in note
