"""Models with steps on the terminal: the lines of ``ingot inspect``, and the command that ``ingot serve`` prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ingot
from ingot.cli.archives.steps import described
from ingot.cli.serving import answers
from ingot.cli.serving.serve import curl
from ingot.model_store import Archive
from ingot.model_store.format.evidence import StepsEvidence
from tests.server import test_apis, test_image_steps, test_steps, test_token_tasks
from tests.support import RequireTool, RunIngot, succeeded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    test_apis.table(folder).save(folder / "table.ingot")
    test_apis.ranker(folder).save(folder / "ranker.ingot")
    test_steps.make(folder).save(folder / "length.ingot")
    test_image_steps.make(folder).save(folder / "colour.ingot")
    return folder


def test_inspect_shows_the_task_the_raw_interface_and_the_steps(folder: Path, run_ingot: RunIngot) -> None:
    shown = succeeded(run_ingot("inspect", folder / "table.ingot"))
    for line in (
        "   task  sentence-similarity",
        "    raw  text:string[batch]",
        "    raw  prompt_name:string[batch] (optional)",
        " answer  embedding:float32[batch,4]",
        "  steps  tokenize -> graph -> pool",
        "  limit  16 tokens with special tokens; longer texts are cut, and counted in cut_tokens",
        "prompts  query, document; default: none",
        "  proof  none: the steps are as declared",
        "  input  input_ids:int64[batch,seq]",
    ):
        assert f"{line}\n" in shown
    shown = succeeded(run_ingot("inspect", folder / "length.ingot"))
    assert " labels  2 by softmax: LONG, SHORT\n" in shown


def test_the_proof_is_shown_as_it_was_measured(folder: Path) -> None:
    steps = Archive.open(folder / "length.ingot").variant().serving.steps
    assert steps is not None
    evidence = StepsEvidence(reference="BertTokenizer", items=312, answers=64, error=3e-7, tolerance=1e-5)
    lines = dict(described(steps, evidence))
    assert lines["proof"] == (
        "as BertTokenizer: tensors of 312 hard inputs are equal, answers of 64 samples within 3.0e-07"
    )
    lines = dict(described(steps, evidence.model_copy(update={"deviation": 2e-4})))
    assert "tensors of 312 hard inputs are within 2.0e-04, answers" in lines["proof"]


def test_labels_of_entities_are_shown(tmp_path: Path) -> None:
    steps = test_token_tasks.make(tmp_path)["entities"].variant().serving.steps
    assert steps is not None
    assert dict(described(steps, None))["labels"] == "4: O, B-PER, I-PER, B-LOC"


def test_the_command_that_serve_prints_sends_raw_inputs(folder: Path, require_tool: RequireTool) -> None:
    require_tool("curl")
    Image.new("RGB", (90, 60), "blue").save(folder / "picture.jpg")
    with ingot.serve(*map(str, folder.glob("*.ingot")), http_port=0, grpc_port=0) as server:
        commands = {model.name: curl(server.http_url, model) for model in server._server.repository}
        answers = {name: json.loads(run(command, folder)) for name, command in commands.items()}
    assert answers["length"]["outputs"][0]["data"] == ["LONG", "SHORT"]  # of letters
    assert answers["colour"][0]["label"] == "blue"
    assert answers["table"]["outputs"][0]["shape"] == [1, 4]
    assert [item["name"] for item in answers["ranker"]["outputs"]] == ["score", "tokens", "cut_tokens"]


def test_texts_without_entities_or_answers_are_told() -> None:
    none: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {"count": np.zeros(1, np.int32)}
    rows = {name: np.empty((1, 0), object) for name in ("entity", "word", "answer", "score", "start", "end", "index")}
    entity = {name: rows[name] for name in rows if name != "answer"}
    answer = {name: rows[name] for name in ("answer", "score", "start", "end")}
    assert answers.lines_of({**none, **entity}) == ["no entities"]
    assert answers.lines_of({**none, **answer}) == ["no answers"]


def run(command: str, folder: Path) -> bytes:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, check=True).stdout
