from __future__ import annotations

import numpy as np
from onnx import helper

from ingot.model_store import BatchLatency, Evidence
from ingot.model_store.diff import diff, view
from tests.model_store.diff.models import EVIL, graph, one, tensor, with_evidence


class TestView:
    def test_names_from_the_archive_drive_neither_terminal_nor_page(self) -> None:
        node = helper.make_node(EVIL, ["x"], ["y"])
        first = with_evidence(machine=EVIL, latency=(BatchLatency(rows=1, seconds=1e-3),))
        second = first.model_copy(
            update={"precision": EVIL, "recipe": {"name": EVIL, EVIL: EVIL}, "evidence": Evidence()}
        )
        before = one(graph(tensor(EVIL, np.ones(3, "f4")), tensor(f"{EVIL}2", np.ones(2, "f4"))), first)
        after = one(graph(tensor(EVIL, np.zeros(3, "f4")), nodes=[node]), second)
        found = diff(before, after, labels=(EVIL, EVIL))
        lines = view.text(found)
        assert "owned" in lines
        assert not any(line.startswith("fake") for line in lines.splitlines())
        assert lines.replace("\n", "").isprintable()
        page = view.html(found)
        assert "<b>" not in page
        assert page.isprintable()

    def test_only_so_many_rows_are_shown(self) -> None:
        first, second = (
            graph(*(tensor(f"w{index}", np.array([1, index * factor], "f4")) for index in range(1, 9)))
            for factor in (1, 2)
        )
        found = diff(one(first), one(second))
        lines = [line.split()[0] for line in view.text(found, 2).splitlines() if line.startswith("    ")]
        assert lines == ["type", "w8", "w7", "and"]
        assert "and 6 more" in view.html(found, 2)
        assert "tensors: 0 unchanged, 8 changed" in view.text(found, 2)
