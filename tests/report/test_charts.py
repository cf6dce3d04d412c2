from __future__ import annotations

from xml.etree import ElementTree

import pytest

from ingot.report import charts
from ingot.report.charts import Curve


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
