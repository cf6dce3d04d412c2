from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ingot.report import charts
from ingot.report.charts import Bar, Curve, Kind, Point
from ingot.report.text import short_labels

SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = {"broad": 860, "narrow": 340}


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("count", [2, 10])
def test_a_chart_is_a_standalone_file(log: bool, count: int) -> None:
    lines = [Curve(f"server <{n}>", ((1.0, n + 1.0), (8.0, n + 2.0), (32.0, n + 9.0)), n) for n in range(count)]
    image = charts.image(charts.curves(lines, ("requests/s", "p50, ms"), log=log), "a & b")
    root = ElementTree.fromstring(image)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a & b"
    assert [text for text in texts if text and text.startswith("server")] == [line.label for line in lines]
    curves = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert [curve.attrib["class"] for curve in curves] == [f"curve c{n}" for n in range(count)]


def test_without_data_there_is_no_chart() -> None:
    assert charts.curves([Curve("empty", (), 0)], ("x", "y")) == ""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_legend_of_curves_is_outside_of_them(width: str, count: int) -> None:
    lines = [Curve(f"line {n}", ((1.0, 9.0), (2.0, n + 1.0)), n) for n in range(count)]
    drawing = drawings(charts.curves(lines, ("x", "y"), log=False, limit=(12.0, "objective")))[width]
    grid = [item.attrib for item in drawing.iter(f"{SVG}line")]
    right, bottom = max(float(line["x2"]) for line in grid), max(float(line["y2"]) for line in grid)
    places = [(x, y) for text, x, y, *_ in boxes(drawing) if text.startswith("line")]
    assert len(places) == count
    assert all(x > right or y > bottom for x, y in places)
    whole = [float(part) for part in drawing.attrib["viewBox"].split()]
    assert all(x < whole[2] and y + 10 < whole[3] for x, y in places)


def drawings(chart: str) -> dict[str, ElementTree.Element]:
    """Return both drawings of a chart, by the width of the screens that they are for."""
    root = ElementTree.fromstring(f'<div xmlns="http://www.w3.org/2000/svg">{chart}</div>')
    return {part.attrib["class"]: part[0] for part in root if part.tag == f"{SVG}div"}


def boxes(drawing: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Return the labels of the points with their places; a character is taken to be 6.4 pixels wide."""
    labels = [item for item in drawing.iter(f"{SVG}text") if item.attrib["class"] == ""]
    places = [(item.text or "", float(item.attrib["x"]), float(item.attrib["y"])) for item in labels]
    return [(text, x, y - 10, x + 6.4 * len(text), y + 2) for text, x, y in places]


KINDS: tuple[Kind, ...] = ("refused", "held", "chosen", "original")


@pytest.mark.parametrize("width", WIDTHS)
def test_labels_overlap_neither_each_other_nor_points(width: str) -> None:
    points = [
        Point(
            f"static int8, layers alone, {n} kept of all",
            1 + n / 400,
            0.9 + n % 7 / 1e4,
            low=0.9,
            high=0.901,
            kind=kind,
        )
        for n, kind in enumerate(KINDS * 6)
    ]
    drawing = drawings(charts.scatter(points, ("ms", "accuracy")))[width]
    found = boxes(drawing)
    assert len(found) >= 4
    assert len({label for label, *_ in found}) == len(found)
    dots = [(float(item.attrib["cx"]), float(item.attrib["cy"])) for item in drawing.iter(f"{SVG}circle")]
    for number, (_, left, top, right, bottom) in enumerate(found):
        assert left > 0
        assert right < WIDTHS[width]
        assert not any(left < x < right and top < y < bottom for x, y in dots)
        for _, *other in found[:number]:
            assert not (left < other[2] and other[0] < right and top < other[3] and other[1] < bottom)


@pytest.mark.parametrize("width", WIDTHS)
def test_different_labels_are_not_cut_alike(width: str) -> None:
    labels = [f"encoder.layers.{n}.attention.self.output.dense.projection" for n in (0, 1, 11)]
    points = [Point(label, n + 1.0, n, low=n, high=n, kind="held") for n, label in enumerate(labels)]
    bars = [Bar(label, 1.0, "", color=0) for label in labels]
    curves = [Curve(label * 2, ((1.0, 1.0), (2.0, 2.0)), n) for n, label in enumerate(labels)]
    for chart in (charts.bars(bars, "x"), charts.curves(curves, ("x", "y")), charts.scatter(points, ("x", "y"))):
        shown = [
            item.text
            for item in drawings(chart)[width].iter(f"{SVG}text")
            if "\N{HORIZONTAL ELLIPSIS}" in (item.text or "")
        ]
        assert len(set(shown)) == len(shown) == 3
    assert short_labels(["same" * 9, "same" * 9], 8) == ["sam\N{HORIZONTAL ELLIPSIS}same"] * 2
    assert len(set(short_labels([f"{'a' * n}{'b' * 40}{'a' * (9 - n)}" for n in range(10)], 8))) == 10
