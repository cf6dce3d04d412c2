"""The tasks and the forms of answers: each part that knows them has all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import ingot.server
from ingot import steps
from ingot.cli.serving import answers
from ingot.errors import InvalidArgument
from ingot.export import tasks as folders
from ingot.server.plane.apis import files, on_tokens
from ingot.steps.tasks.declared import TASKS, read_steps
from ingot.tasks import FORMS, ON_TEXTS, Declared, Generating, Task, form_of
from tests.steps.bert import tokenizer_file

# The steps of whose answers a request on texts makes its own form.
ON_TOKENS = {"entities", "spans", "words"}


def test_each_task_has_a_function_and_a_finder() -> None:
    known = {*get_args(Task)} - {"auto", "none"}
    assert {*folders._FINDERS} == known
    assert {*TASKS} == known - {*get_args(Generating)} | {*get_args(Declared)}
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
    assert all(
        form_of({name: 2 if name == "label" else 1 for name in needed}) == form for form, needed in FORMS.items()
    )  # none hides a later one


def test_answers_have_the_form_of_their_outputs() -> None:
    described = steps.object_detection(["cat"], size=8, mean=(0, 0, 0), std=(1, 1, 1))
    assert described.steps.described["answer_form"] == "boxes"
    assert "answer_form" not in steps.embedding(tokenizer_file(), 4).steps.described


ON_TEXTS_FILE = 'task = "text-classification"\ntokenizer = "tokenizer.json"\n'
VECTORS_FILE = 'task = "sentence-similarity"\ntokenizer = "tokenizer.json"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'{VECTORS_FILE}size = 4\npooling = "nope"', "'pooling' is 'nope': input should be 'cls', 'max', 'mean'"),
        (f'{VECTORS_FILE}size = "x"', "'size' is 'x': input should be a valid integer"),
        (VECTORS_FILE, "'size' is missing"),
        (
            f'{ON_TEXTS_FILE}labels = ["a"]\nmax_length = -1',
            "'max_length' is -1: input should be greater than or equal",
        ),
        (f'{ON_TEXTS_FILE}labels = ["a"]\nmaxlength = 9', "'maxlength' is not an option of the task"),
        ('task = "image-classification"\nlabels = 3', "'labels' is 3: input should be"),
        ('task = "image-classification"\nlabels = ["a"]\nmean = [1, 2]', "'mean.2' is missing"),
        (
            'task = "audio-classification"\nlabels = ["a"]\nrate = 16000\noperations = [{kind = "what"}]',
            "'operations.0' is {'kind': 'what'}, which has no 'operation'",
        ),
    ],
)
def test_a_wrong_option_of_a_file_is_named_with_its_value(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file())
    (tmp_path / "steps.toml").write_text(content)
    with pytest.raises(InvalidArgument, match=message) as raised:
        read_steps(tmp_path / "steps.toml")
    assert str(raised.value).startswith(f"{tmp_path}/steps.toml")
    assert "\n" not in str(raised.value)
    assert "pydantic" not in str(raised.value)


def test_a_wrong_option_in_python_is_named_too() -> None:
    with pytest.raises(InvalidArgument, match="'top_k' is -1: input should be greater than or equal to"):
        steps.text_classification(tokenizer_file(), ["a"], top_k=-1)
