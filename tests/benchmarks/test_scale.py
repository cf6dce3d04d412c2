"""The benchmarks of scale in small; the runs themselves take minutes and are not tests."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.scale import balancing, processes
from benchmarks.serving.models import model
from tests.support import ROOT


@pytest.mark.matrix
def test_what_a_balancer_knows_decides_the_tail_at_high_load() -> None:
    found = {
        name: balancing.simulate("minilm", balancing.SPREAD, 0.9, name, replicas=50, scale=0.5)
        for name in balancing.BALANCERS
    }
    p99 = {name: row.p99 for name, row in found.items()}
    assert p99["least wait"] < p99["two choices"] < p99["round robin"] < p99["random"]
    assert p99["two choices"] < p99["two choices, 100 ms old"]
    # All requests of 100 ms go to the replicas that seemed idle at its beginning.
    assert p99["least wait, 100 ms old"] > p99["two choices, 100 ms old"]
    assert p99["least wait, 100 ms old, own requests counted"] < p99["least wait, 100 ms old"]
    assert found["least wait"].goodput > 0.99


def test_the_tables_and_the_chart_name_every_balancer() -> None:
    rows = [
        balancing.simulate("large", spread, load, name, replicas=3, scale=0.02)
        for spread in (0.0, balancing.SPREAD)
        for load in (0.5, 0.8)
        for name in balancing.BALANCERS
    ]
    text = balancing.page(rows, 3)
    assert text.count("| least wait |") == 2
    assert "load 0.5 | load 0.8" in text
    assert ElementTree.fromstring(balancing.picture(rows)).tag.endswith("svg")


def test_the_page_has_a_place_for_the_tables() -> None:
    page = (ROOT / "docs" / "guides" / "deploy" / "scale.md").read_text()
    assert page.count("<!-- balancing: begin -->") == page.count("<!-- balancing: end -->") == 1


@pytest.mark.matrix
def test_whole_servers_share_a_port(tmp_path: Path) -> None:
    served = model("tiny", tmp_path)
    found = dict(processes.measured(served, processes.Way(2, ("--share-port",)), 2, clients=8, seconds=1))
    assert set(found) == {"binary", "json"}
    assert all(load.rate > 0 and load.cpu > 0 for load in found.values())
