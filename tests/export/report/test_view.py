"""The rendered report shows everything, and hostile content in it is harmless."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from ingot.export.report import Attempt, GraphView, Node, Report, Rewrite, Stage
from ingot.export.report.view import html, text
from ingot.model_store import ParityEvidence
from tests.support import Page


def node(name: str, operator: str = "aten.add.Tensor", module: str = "", **more: Any) -> Node:
    return Node(name=name, operator=operator, module=module, **more)


def graph(title: str, *nodes: Node) -> GraphView:
    operators: dict[str, int] = {}
    for item in nodes:
        operators[item.operator] = operators.get(item.operator, 0) + 1
    return GraphView(title=title, nodes=nodes, operators=operators)


LINEAR = node("linear", "aten.linear.default", "body.0", inputs=("x", "weight"), shape="[batch,8]", source="net.py:12")
REPORT = Report(
    name="digits",
    source="my_model:Net",
    created="2026-01-02T03:04:05Z",
    versions={"torch": "2.13.0", "ingot": "9.8.7"},
    inputs=("image:float32[batch,1,8,8]",),
    outputs=("logits:float32[batch,10]",),
    batch="batch",
    attempts=(Attempt(route="export", failure="a branch on values"), Attempt(route="strict")),
    stages=(
        Stage(name="probe", seconds=0.25),
        Stage(
            name="lower",
            seconds=1.5,
            detail="opset 20",
            parity=(ParityEvidence(tensor="logits", error=3.5e-7, tolerance=1e-4, cases=11),),
        ),
    ),
    rewrites=(
        Rewrite(rule="conv-bn", kind="fx", matches=17, error=2.5e-6),
        Rewrite(rule="gelu", kind="onnx", matches=1, rejected="ParityError: too far"),
    ),
    graphs=(
        graph("FX as captured", LINEAR, node("norm", "aten.batch_norm.default", "body.1")),
        graph("FX rewritten", LINEAR, node("fused", "aten.conv2d.default", "body.1")),
        graph("ONNX", node("linear", "Gemm", "body.0")),
    ),
    sizes={"graph": 2048, "weights": 5_000_000},
    outside_opset=("aten.special_erfcx.default",),
    notes=("fixed in the graph: use_cache=False",),
)


SHOWN_AS = {0.25: "0.25 s", 1.5: "1.50 s", 3.5e-7: "3.5e-07", 1e-4: "1e-04", 2.5e-6: "2.5e-06", 2048: "2 KiB"}
SHOWN_AS |= {5_000_000: "4.77 MiB"}


def leaves(record: Any) -> Iterator[str]:
    """Yield everything that a report says, as people read it."""
    match record:
        case BaseModel():
            for name in type(record).model_fields:
                yield from leaves(getattr(record, name))
        case dict():
            for key, value in record.items():
                yield key
                yield from leaves(value)
        case tuple():
            for item in record:
                yield from leaves(item)
        case None:
            return
        case _:
            yield SHOWN_AS.get(record, str(record))


@pytest.mark.parametrize("shown", [text(REPORT, nodes=True), Page(html(REPORT)).text], ids=["text", "html"])
def test_every_field_is_shown(shown: str) -> None:
    said = list(leaves(REPORT))
    assert len(said) > 60
    # A module's path is split into its parts where the page unfolds it.
    missing = [item for item in said if item not in shown and not all(part in shown for part in item.split("."))]
    assert missing == []


def test_weights_in_the_graph_are_not_shown_as_missing() -> None:
    held = REPORT.model_copy(update={"sizes": {"graph": 2048, "weights": 0}})
    shown = text(held)
    assert re.search(r"^  graph +2 KiB$", shown, re.MULTILINE)
    assert "  weights  in the graph\n" in shown
    assert "<dt>weights</dt><dd>in the graph</dd>" in html(held)
    assert "0 B" not in shown + html(held)
    assert shown.endswith(f"report format {REPORT.schema_version}\n")


def test_the_text_is_short_unless_nodes_are_requested() -> None:
    short, long = text(REPORT).split("\n"), text(REPORT, nodes=True).split("\n")
    assert "  linear [batch,8] = aten.linear.default(x, weight)  # body.0 net.py:12" in long
    assert not any(line.startswith("  linear") for line in short)
    assert "FX as captured: 2 nodes" in short
    assert "  aten.linear.default      1" in short
    assert "  export: a branch on values" in short
    assert "  strict: taken" in short
    assert "  lower, 1.50 s: opset 20" in short
    assert "    logits: error 3.5e-07, tolerance 1e-04, 11 cases" in short
    assert any(re.fullmatch(r"  gelu +onnx +1x +rejected: ParityError: too far", line) for line in short)


def test_empty_parts_have_no_section() -> None:
    report = Report(name="bare", source="here", created="now")
    assert text(report).split("\n") == [
        "bare, exported from here at now",
        "",
        "Batch dimension: none",
        "",
        "Made with unknown versions; report format 1",
        "",
    ]
    page = Page(html(report))
    assert page.count("section") == 1
    assert page.count("table") == 0


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\" ' & </style></title>"


def hostile(record: Any) -> Any:
    """Return a report with hostile content in every text."""
    match record:
        case BaseModel():
            names = type(record).model_fields
            return record.model_copy(update={name: hostile(getattr(record, name)) for name in names})
        case dict():
            return {f"{HOSTILE}{key}": hostile(value) for key, value in record.items()}
        case tuple():
            return tuple(map(hostile, record))
        case str():
            return f"{HOSTILE}{record}"
        case _:
            return record


def test_hostile_names_stay_text() -> None:
    page = Page(html(hostile(REPORT)))
    tags = {tag for tag, _ in page.seen}
    assert not tags & {"script", "img"}
    assert tags == {tag for tag, _ in Page(html(REPORT)).seen}
    assert page.text.count("<script>alert(1)</script>") > 30
    assert not any("onerror" in attributes for _, attributes in page.seen)


def test_the_page_is_self_contained() -> None:
    page = html(REPORT)
    assert not re.search(r"https?:|url\(|@import|src=|href=", page)
    policy = {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"}
    assert ("meta", policy) in Page(page).seen


def test_changes_of_a_rewrite_are_marked_between_graphs_of_one_kind() -> None:
    page = html(REPORT)
    assert '<li class="gone"><b>aten.batch_norm.default</b> norm' in page
    assert '<li class="made"><b>aten.conv2d.default</b> fused' in page
    assert page.count('<li class="') == 2
    assert "not in the one before" in page
    assert "not in the one before" not in html(REPORT.model_copy(update={"graphs": REPORT.graphs[1:]}))


@pytest.mark.matrix
def test_a_large_graph_is_folded_by_modules() -> None:
    layers = [
        node(f"n{layer}_{index}", f"op{index % 30}", f"encoder.layers.{layer}.mlp")
        for layer in range(50)
        for index in range(58)
    ]
    untold = [node(f"u{index}", "Reshape") for index in range(100)]
    page = Page(html(REPORT.model_copy(update={"graphs": (graph("ONNX", *layers, *untold),)})))
    assert page.count("li") == 3000 + 2  # the two lists above the graphs
    assert page.count("details") == 1 + 1 + 1 + 50  # operators, nodes of no module, encoder.layers, each layer
    assert not any("open" in attributes for tag, attributes in page.seen if tag == "details")
    assert "encoder.layers" in page.words
    assert "7.mlp" in page.words
    assert page.text.index("no module") < page.text.index("encoder.layers")


def test_modules_may_be_deeply_nested() -> None:
    deep = graph("FX", node("n", module=".".join("abcdefghij" * 300)))
    assert Page(html(REPORT.model_copy(update={"graphs": (deep,)}))).count("li") == 2 + 1


def test_a_failed_proof_is_marked() -> None:
    (probe, lower) = REPORT.stages
    evidence = ParityEvidence(tensor="logits", error=float("inf"), tolerance=1e-4, cases=2)
    failed = REPORT.model_copy(update={"stages": (probe, lower.model_copy(update={"parity": (evidence,)}))})
    assert '<span class="bad">&#10007; inf</span>' in html(failed)
    assert '<span class="good">&#10003; 3.5e-07</span>' in html(REPORT)


def test_a_report_that_would_be_too_large_keeps_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert REPORT.bounded() is REPORT
    monkeypatch.setattr("ingot.export.report.MAX_BYTES", 1000)
    bounded = REPORT.bounded()
    assert [(each.title, each.nodes, each.operators) for each in bounded.graphs] == [
        (each.title, (), each.operators) for each in REPORT.graphs
    ]
    assert "FX as captured: 2 nodes" in text(bounded)


@pytest.mark.matrix
def test_a_narrow_screen_shows_every_cell(browser: Any) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.set_content(html(REPORT))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = "[...document.querySelectorAll('.wide')].filter((each) => each.scrollWidth > each.clientWidth).length"
    assert page.locator(".wide").count() == 3
    assert page.evaluate(cut) == 0
    title = "(cell) => getComputedStyle(cell, '::before').content"
    assert page.get_by_text("1e-04", exact=True).evaluate(title) == '"Tolerance "'
    page.close()
