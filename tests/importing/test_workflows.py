"""Workflows of TorchServe, imported as pipelines of their functions and models."""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from ingot import Store
from ingot.errors import InvalidArgument
from ingot.importing import Consent, candidates
from tests.importing.sources import mar
from tests.support import RunIngot, refused, succeeded

FUNCTIONS = """
import json


def first(data, context):
    if data is None:
        return None
    return [(row.get("data") or row.get("body")).decode().strip() for row in data]


def last(data, context):
    if data:
        keys = [sorted(row) for row in data]
        assert keys == [["count", "upper"]] * len(data), keys
        return [{"upper": json.loads(row["upper"])["text"], "length": json.loads(row["count"])["n"]} for row in data]
"""
HANDLER = "def handle(data, context):\n    return data and [%s for row in data]\n"
MODELS = """
models:
  min-workers: 1
  batch-size: 4
  upper: {url: upper.mar}
  count: {url: count.mar, batch-size: 2}
"""
BOTH = (
    MODELS
    + """
dag:
  first: [upper, count]
  upper: [last]
  count: [last]
"""
)
LEAVES = (
    MODELS
    + """
dag:
  first: [upper, count]
"""
)


def war(path: Path, specification: str, **more: Any) -> Path:
    workflow = {"workflowName": "both", "specFile": "wf.yaml", "handler": "functions.py", **more}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("WAR-INF/MANIFEST.json", json.dumps({"workflow": workflow}))
        file.writestr("wf.yaml", specification)
        file.writestr("functions.py", FUNCTIONS)
    return path


def lines(path: Path) -> str:
    with candidates(path, Consent(allow_code=True)) as found:
        return found[-1].lines


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("specification", "wanted"),
    [
        (BOTH, {"upper": "HELLO", "length": 5}),
        (LEAVES, {"upper": {"text": "HELLO"}, "count": {"n": 5}}),
    ],
)
def test_a_workflow_answers_as_its_functions_do(
    tmp_path: Path, run_ingot: RunIngot, specification: str, wanted: dict[str, Any]
) -> None:
    store = tmp_path / "store"
    allowed = ("--allow-code", "--store", str(store))
    for name, result in (("upper", '{"text": row["body"].decode().upper()}'), ("count", '{"n": len(row["body"])}')):
        path = mar(tmp_path / f"{name}.mar", {"h.py": (HANDLER % result).encode()}, handler="h.py", modelName=name)
        succeeded(run_ingot("import", str(path), *allowed))
    config = tmp_path / "ingot.toml"
    config.write_text(succeeded(run_ingot("import", str(war(tmp_path / "both.war", specification)), *allowed)))
    ports: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "torchserve": True, "torchserve_ports": "0,0,0,0,0"}
    with ingot.serve(store=Store(store), config=config, allow_code=True, **ports) as server:
        url = server.torchserve_urls["inference"]
        answer = httpx.post(f"{url}/wfpredict/both", files={"data": (None, b" hello ")}, trust_env=False, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == wanted
        missing = httpx.post(f"{url}/wfpredict/upper", content=b"x", trust_env=False)
        assert (missing.status_code, missing.json()["message"]) == (404, "Workflow not found: upper")


def test_a_node_of_several_parents_reads_a_row(tmp_path: Path) -> None:
    nodes = tomllib.loads(lines(war(tmp_path / "both.war", BOTH)))["pipelines"]["both"]["nodes"]
    assert nodes["last-row"] == {"step": "row", "inputs": {"upper": "upper.body", "count": "count.body"}}
    assert nodes["last"] == {"model": "both__last", "inputs": {"data": "last-row.row"}}
    assert nodes["upper"] == {"model": "both__upper", "inputs": {"data": "first.body"}}


@pytest.mark.parametrize(
    ("specification", "message"),
    [
        ("models: {}", "must have one first node in dag, but has 0"),
        ("dag: {a: [c], b: [c]}", "must have one first node in dag, but has 2"),
        ("dag: {s: [a], a: [b], b: [a, c]}", "the nodes wait for each other in a cycle"),
        ("dag: {a: [b], b: [c], c: [b]}", "the nodes wait for each other in a cycle"),
        ("dag: {a b: [c]}", "'a b' is not a node's name"),
        ("models: {m: {}}\ndag: {m: []}", "the model 'm' has no url"),
        ("dag: [", "wf.yaml in .* is not valid"),
        ("dag: &a {x: [y]}\nmodels: *a", "it has aliases"),
        ("dag: " + "[" * 20_000, "its values are nested more than 50 deep"),
    ],
)
def test_specifications_that_are_none(tmp_path: Path, specification: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        lines(war(tmp_path / "w.war", specification))


def test_what_a_workflow_needs_is_named(tmp_path: Path, run_ingot: RunIngot) -> None:
    path = war(tmp_path / "both.war", BOTH)
    message = refused(run_ingot("import", str(path)))
    assert re.search(r"has functions in Python, 'functions.py': first, last; .*--allow-code", message), message
    assert "leave out the reference" in refused(run_ingot("import", str(path), "net:1", "--allow-code"))
    with pytest.raises(InvalidArgument, match="holds a pipeline"):
        ingot.import_model(path, allow_code=True)
    with pytest.raises(InvalidArgument, match=r"other.yaml in .*, which is not in it"):
        lines(war(tmp_path / "other.war", BOTH, specFile="other.yaml"))
