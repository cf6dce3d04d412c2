"""The tasks and the forms of answers: each part that knows them has all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import ingot.server
from ingot import steps
from ingot.cli import answers
from ingot.export import tasks as folders
from ingot.server.plane.apis import files, on_tokens
from ingot.steps.declared import TASKS
from ingot.tasks import FORMS, ON_TEXTS, Declared, Task, form_of
from tests.steps.bert import tokenizer_file

# The steps of whose answers a request on texts makes its own form.
ON_TOKENS = {"entities", "spans", "words"}


def test_each_task_has_a_function_and_a_finder() -> None:
    known = {*get_args(Task)} - {"auto", "none"}
    assert {*folders._FINDERS} == known
    assert {*TASKS} == known | {*get_args(Declared)}
    assert {*on_tokens.TASKS} < {*ON_TEXTS} < known


def test_each_form_of_answers_is_drawn_everywhere() -> None:
    page = (Path(ingot.server.__path__[0]) / "page" / "answers.js").read_text()
    drawn = re.findall(r"^  (\w+): \{each: ", page, re.MULTILINE)
    assert {*drawn} == {*answers.LINES} == {*FORMS}
    assert {*files.FORMS} | ON_TOKENS == {*FORMS}
    reads = dict(re.findall(r"^  (\w+): \{each: \w+, reads: \[(.*)\]", page, re.MULTILINE))
    known = {"count", "seconds"}  # drawn for answers of any form
    for form, needed in FORMS.items():
        assert {*re.findall(r"\w+", reads[form])} >= needed - known, form
    assert all(form_of(needed) == form for form, needed in FORMS.items())  # none hides a later one


def test_answers_have_the_form_of_their_outputs() -> None:
    described = steps.object_detection(["cat"], size=8, mean=(0, 0, 0), std=(1, 1, 1))
    assert described.steps.described["answer_form"] == "boxes"
    assert "answer_form" not in steps.embedding(tokenizer_file(), 4).steps.described
