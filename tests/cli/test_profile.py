"""``ingot profile`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from tests.support import RunIngot, refused, succeeded


@pytest.mark.matrix
def test_the_operators_of_a_variant(run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    done = succeeded(run_ingot("profile", f"{digits_archive}#int8", "--calls", "5", "--trace", "calls.json"))
    parts = ("variant int8", "QLinearConv", "1 row", "32 rows", "in operators", "whole call, profiler off")
    words = " ".join(done.split())  # the title is wrapped to the width of the table
    assert [part for part in parts if part not in words] == []
    events = json.loads((tmp_path / "calls.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"1 rows", "32 rows"}
    assert {event["name"] for event in events if event["ph"] == "X"} > {"model_run"}


@pytest.mark.matrix
def test_the_nodes_as_a_table_and_as_json(run_ingot: RunIngot, digits_fp32: Path) -> None:
    command = ("profile", digits_fp32, "--batch", "2", "--calls", "3")
    assert "Conv" in succeeded(run_ingot(*command, "--by", "node"))
    [found] = json.loads(succeeded(run_ingot(*command, "--json")))["profiles"]
    assert found["rows"] == 2
    assert found["seconds"] > 0
    times = [each["seconds"] for each in found["operators"]]
    assert times == sorted(times, reverse=True)
    assert sum(each["operator"] == "Conv" for each in found["operators"]) == 3


@pytest.mark.matrix
def test_names_of_nodes_do_not_control_the_terminal(run_ingot: RunIngot, tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["y"], name="[/a]\x1b]0;b\x07")], "g", values[:1], values[1:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "odd.onnx").write_bytes(model.SerializeToString())
    succeeded(run_ingot("import", "odd.onnx", "odd:1"))
    done = succeeded(run_ingot("profile", "odd:1", "--by", "node", "--batch", "1", "--calls", "3"))
    assert "[/a]\\x1b]0;b\\x07" in done


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.ingot"], "there is no file nope.ingot"),
        (["digits.ingot#bf16"], "has no variant 'bf16'"),
        (["digits.ingot", "--batch", "100000000"], "change --batch"),
        (["digits.ingot", "--trace", "calls.txt"], "must end in .json"),
    ],
)
def test_mistakes(run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "digits.ingot").symlink_to(digits_fp32)
    assert message in refused(run_ingot("profile", *arguments))
