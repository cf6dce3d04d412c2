"""Stop texts, found wherever an answer is divided."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ingot.steps.completion.stops import StopTexts

_SHORT = st.text("ab\n", min_size=1, max_size=4)


def read(stops: list[str], pieces: list[str]) -> tuple[list[str], str]:
    stream = StopTexts(stops)
    returned = [stream.add(piece) for piece in pieces]
    return [*returned, stream.end()], stream.found


@given(st.text("ab\n", max_size=30), st.lists(_SHORT, max_size=3), st.lists(st.integers(0, 30), max_size=8))
def test_the_division_into_pieces_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
    returned, found = read(stops, pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(returned) == (text[: min(ends)[1]] if ends else text)
    assert bool(found) == bool(ends)


def test_a_possible_beginning_is_kept_back_and_the_rest_is_not() -> None:
    stream = StopTexts(["\nUser:"])
    assert stream.add("yes\n") == "yes"
    assert stream.add("Us") == ""
    assert stream.add("ed") == "\nUsed"
    assert stream.add("\nUser") == ""
    assert stream.add(": hi") == ""
    assert (stream.found, stream.add("more"), stream.end()) == ("\nUser:", "", "")


def test_what_was_kept_back_is_returned_at_the_end() -> None:
    assert read(["END"], ["the EN"]) == (["the ", "EN"], "")
