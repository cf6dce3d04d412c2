"""``ingot graph`` as a user types it, and its page in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ingot.export import export_model
from tests import onnx_models
from tests.browsers import Opened
from tests.support import RunIngot, refused, run_python, succeeded

TABS = ["captured FX", "ONNX fp32", "ONNX int8"]


@pytest.mark.matrix
def test_all_graphs_of_an_archive(run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    result = run_ingot("graph", digits_archive)
    done = succeeded(result)
    assert "wrote digits-graph.html" in result.stderr
    assert re.search(r"aten.batch_norm.default +│ +3 │", done)
    assert re.search(r"QuantizeLinear +│ +│ +\d", done)
    page = (tmp_path / "digits-graph.html").read_text()
    assert re.findall(r"<label[^>]*>([^<]*)</label>", page) == [*TABS, "fit to width"]
    assert "22 added" in page
    assert "float32[batch,64,8,8]" in page
    assert "float32[64,32,3,3]  72 KiB" in page
    assert not re.search(r"https?:|url\(|@import|src=|<script", page)


def test_one_variant_as_svg(run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    succeeded(run_ingot("graph", f"{digits_archive}#int8", "-o", "int8.svg"))
    svg = (tmp_path / "int8.svg").read_text()
    root = ElementTree.fromstring(svg)
    texts = ["".join(item.itertext()) for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "digits: ONNX int8"
    assert texts.count("Conv") == 3
    assert "QuantizeLinear" in texts
    assert "added" in texts


@pytest.mark.matrix
def test_one_stage_as_json(run_ingot: RunIngot, tmp_path: Path) -> None:
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x)

    export_model(Gate(), inputs="x:float32[batch,3]", name="gate").save(tmp_path / "gate.ingot")
    done = json.loads(succeeded(run_ingot("graph", "gate.ingot", "--stage", "rewritten", "--json")))
    [stage] = done["stages"]
    assert (stage["stage"], stage["nodes"], done["file"]) == ("rewritten", 1, "gate-graph.html")
    assert stage["operators"] == {"aten.silu.default": 1}


def test_an_onnx_file(run_ingot: RunIngot, tmp_path: Path) -> None:
    onnx_models.affine(tmp_path)
    assert "Mul" in succeeded(run_ingot("graph", "./affine.onnx"))
    assert "float32[batch,3]" in (tmp_path / "affine-graph.html").read_text()


def test_the_body_of_a_loop_is_drawn(run_ingot: RunIngot, tmp_path: Path) -> None:
    path = onnx_models.counting(tmp_path)
    succeeded(run_ingot("graph", path))
    page = (tmp_path / "counting-graph.html").read_text()
    assert ">Loop<" in page
    assert ">Add<" in page


def test_a_graph_of_thousands_of_nodes(run_ingot: RunIngot, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", [f"v{n}"], [f"v{n + 1}"], name=f"/layer.{n // 20}/Relu") for n in range(2000)]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in ("v0", "v2000")]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:])), tmp_path / "deep.onnx")
    succeeded(run_ingot("graph", "deep.onnx"))
    page = (tmp_path / "deep-graph.html").read_text()
    assert "99 equal parts, each of 20 nodes" in page  # of the last one the file states a type
    assert page.count('class="card"') < 400


def test_names_that_are_not_text_are_escaped(run_ingot: RunIngot, tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("in", "out")]
    model = helper.make_model(helper.make_graph([helper.make_node("Own", ["in"], ["out"])], "g", ends[:1], ends[1:]))
    content = model.SerializeToString().replace(b"out", b"<\xff>").replace(b"Own", b"O\xffn")
    (tmp_path / "odd.onnx").write_bytes(content)
    assert "O\\udcffn" in succeeded(run_ingot("graph", "odd.onnx"))
    assert "&lt;\\udcff&gt;" in (tmp_path / "odd-graph.html").read_text()


def test_neither_torch_nor_onnx_is_needed(digits_archive: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from ingot.cli.main import application
sys.argv = ["ingot", "graph", {str(digits_archive)!r}, "-o", {str(tmp_path / "g.html")!r}, "--json"]
application("graph")(standalone_mode=False)
print(sorted({{"torch", "onnx", "onnx_ir", "onnxruntime"}} & set(sys.modules)))
"""
    assert run_python(code).endswith("\n[]\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope.ingot"], "there is no file nope.ingot"),
        (["nope.onnx"], "there is no file nope.onnx"),
        (["damaged.onnx"], "damaged.onnx is not an ONNX model: "),
        (["damaged.onnx#fp32"], "which has no variants; leave #fp32 out"),
        (["digits.ingot#bf16"], "has no variant 'bf16'"),
        (["digits.ingot", "--stage", "tuned"], "there is no graph 'tuned'; choose one of captured, fp32"),
        (["digits.ingot", "-o", "graph.svg"], "choose one by --stage: captured, fp32"),
        (["digits.ingot", "-o", "graph.png"], "must end in .html or .svg"),
        (["digits.ingot", "-o", "nowhere/graph.svg"], "there is no folder nowhere"),
    ],
)
def test_mistakes(run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "digits.ingot").symlink_to(digits_fp32)
    (tmp_path / "damaged.onnx").write_bytes(b"\xff" * 40)
    assert message in refused(run_ingot("graph", *arguments))


@pytest.mark.matrix
def test_the_page_in_a_browser(browser: Any, run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    """Nothing is loaded, no text leaves its box, no boxes overlap, and a phone does not scroll sideways."""
    succeeded(run_ingot("graph", digits_archive))
    page = browser.new_page(viewport={"width": 390, "height": 844})
    opened = Opened(page, (tmp_path / "digits-graph.html").as_uri())
    for title in TABS:
        page.get_by_text(title, exact=True).click()
        assert page.locator(".panel:visible svg.diagram").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate(_OUTSIDE) == []
    page.get_by_text("fit to width").click()
    assert page.locator("svg.diagram:visible").bounding_box()["width"] < 390
    page.close()
    assert opened.faults == []


def test_folded_parts_open_where_their_box_leads(browser: Any, run_ingot: RunIngot, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", [f"v{n}"], [f"v{n + 1}"], name=f"/layer.{n // 20}/Relu") for n in range(200)]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 2]) for name in ("v0", "v200")]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:])), tmp_path / "deep.onnx")
    succeeded(run_ingot("graph", "deep.onnx"))
    page = browser.new_page()
    page.goto((tmp_path / "deep-graph.html").as_uri())
    shared = page.locator("details svg").first  # of the first nine layers; of the last one the file states a type
    assert not shared.is_visible()
    page.locator("svg text", has_text="layer.7").click()
    shared.wait_for(state="visible", timeout=10_000)
    page.close()


# Texts wider than the box that they are in, of the visible diagrams.
_OUTSIDE = """
[...document.querySelectorAll("svg.diagram")].filter(svg => svg.checkVisibility()).flatMap(svg =>
  [...svg.querySelectorAll("g > g, a")].flatMap(group => {
    const box = group.querySelector("rect.card").getBoundingClientRect();
    const texts = [...group.querySelectorAll("text")];
    return texts.filter(text => {
      const own = text.getBoundingClientRect();
      return own.left < box.left - 1 || own.right > box.right + 1;
    }).map(text => text.textContent);
  }))
"""


def test_nodes_of_a_cycle_are_counted(run_ingot: RunIngot, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    value = helper.make_tensor_value_info("b", TensorProto.FLOAT, [1])
    graph = helper.make_graph([*nodes, helper.make_node("Exp", ["x"], ["y"])], "g", [], [value])
    (tmp_path / "odd.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    succeeded(run_ingot("graph", "odd.onnx", "-o", "odd.html"))
    assert "2 further nodes are not drawn, as they depend on a cycle" in (tmp_path / "odd.html").read_text()


@pytest.mark.matrix
def test_a_graph_that_takes_too_long_to_draw_is_refused(run_ingot: RunIngot, tmp_path: Path) -> None:
    names = [f"x{number}" for number in range(1001)]
    nodes = [helper.make_node("Sum", names, [f"y{number}"]) for number in range(60)]
    (tmp_path / "dense.onnx").write_bytes(helper.make_model(helper.make_graph(nodes, "g", [], [])).SerializeToString())
    assert "60 nodes with 60,060 inputs, too many to draw" in refused(run_ingot("graph", "dense.onnx"))


PIPELINES = """
[[model]]
name = "detector"
source = "detector:1"

[pipelines.read]
inputs = ["image"]
outputs = { text = ["turned.text", "plain.text"] }

[pipelines.read.nodes.detect]
model = "detector"
inputs = { image = "image" }

[pipelines.read.nodes.crop]
step = "crop"
inputs = { image = "image", box = "detect.box" }
each = "box"
count = "detect.count"

[pipelines.read.nodes.turned]
model = "detector:1"
inputs = { image = "crop.image" }
when = [{ value = "detect.score", above = 0.9 }]

[pipelines.read.nodes.plain]
model = "detector"
inputs = { image = "crop.image" }

[pipelines.other]
inputs = ["x"]
outputs = { y = "a.y" }

[pipelines.other.nodes.a]
model = "detector"
inputs = { x = "x" }
"""


def test_pipelines_of_a_configuration_file(run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "ingot.toml").write_text(PIPELINES)
    assert "wrote ingot-graph.html" in run_ingot("graph", "ingot.toml").stderr
    page = (tmp_path / "ingot-graph.html").read_text()
    assert page.count("<svg") == 2
    assert "one pipeline; choose one by --stage: read, other" in refused(
        run_ingot("graph", "ingot.toml", "-o", "a.svg")
    )
    succeeded(run_ingot("graph", "ingot.toml", "-o", "read.svg", "--stage", "read"))
    root = ElementTree.fromstring((tmp_path / "read.svg").read_text())
    texts = ["".join(item.itertext()) for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"detect: detector", "crop: crop", "turned: detector:1", "plain: detector"} <= {*texts}
    assert {"each box (detect.count)", "when detect.score > 0.9", "turned.text or plain.text"} <= {
        text.strip() for text in texts
    }
    edges = [item for item in root.iter("{http://www.w3.org/2000/svg}path") if item.get("class") == "edge"]
    assert len(edges) == 8
    assert "no pipeline 'x'; it has: read, other" in refused(run_ingot("graph", "ingot.toml", "--stage", "x"))
    done = json.loads(succeeded(run_ingot("graph", "ingot.toml", "--json")))
    assert done["pipelines"] == [{"pipeline": "read", "nodes": 4}, {"pipeline": "other", "nodes": 1}]


def test_a_configuration_file_without_pipelines(run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text('[[model]]\nsource = "a:1"\n')
    assert "empty.toml has no pipelines; it has: none" in refused(run_ingot("graph", "empty.toml"))
