"""The benchmark of the store in small; the run itself takes minutes and is no test."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.model_store import transfer
from benchmarks.model_store.common import BATCHES, Layers
from benchmarks.model_store.load import RESULTS, Found, markdown
from benchmarks.model_store.processes import Worker
from ingot.model_store import BlobFolder, Store
from ingot.runtime import load_engine

SMALL = Layers(megabytes=1, width=256)


def test_the_archive_and_the_file_hold_the_same_model(tmp_path: Path) -> None:
    archive = SMALL.archive(BlobFolder(tmp_path / "blobs"))
    archive.check_own()
    x = SMALL.inputs(3)
    answers = [
        load_engine(path).run({"x": x})["y"] for path in (SMALL.save(tmp_path / "m.onnx"), archive.variant().path())
    ]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_allclose(answers[0], SMALL.answer(x), rtol=1e-3, atol=1e-4)
    assert SMALL.archive(BlobFolder(tmp_path / "again")).digest == archive.digest


@pytest.mark.parametrize("way", ["protobuf", "plain", "ingot"])
def test_a_worker_loads_and_is_timed(tmp_path: Path, way: str) -> None:
    store = Store(tmp_path / "store")
    store.push(SMALL.archive(BlobFolder(tmp_path / "blobs")), "layers:1")
    source = SMALL.save(tmp_path / "m.onnx") if way == "protobuf" else store.root
    with closing(Worker(way, source, SMALL.width)) as worker:
        assert 0 < worker.seconds["loaded"] <= worker.seconds["first"] <= worker.seconds["settled"]
        assert worker.time(8) > 0


def test_the_page_tells_shares() -> None:
    base = Found(2.0, 2.0, 2.0, dict.fromkeys(BATCHES, 0.1), 4.0, None)
    fast = Found(0.1, 0.2, 1.0, dict.fromkeys(BATCHES, 0.05), 1.25, 1.5)
    page = markdown({SMALL: {"protobuf": base, "ingot": fast}})
    assert "| archive | 0.05 | 0.10 | 0.50 | 0.50 | 0.50 | 0.50 | 1.25 | 1.50 |" in page.splitlines()


def test_the_page_that_is_kept_is_of_the_form_that_is_written() -> None:
    kept = (RESULTS / "load.md").read_text().splitlines()
    written = markdown({}).splitlines()
    assert [line for line in written if not line.startswith("machine")] == [
        line for line in kept[: len(written)] if not line.startswith("machine")
    ]


def test_the_page_of_transfers_is_of_the_form_that_is_written() -> None:
    written = transfer.markdown({way: [1.0] for way in transfer.WAYS}, 0.05, 300, "machine").splitlines()
    kept = (RESULTS / "transfer.md").read_text().splitlines()
    assert len(kept) == len(written)
    same = [
        (old, new) for old, new in zip(kept, written, strict=True) if not old.startswith(("machine", "| ", "A fine"))
    ]
    assert all(old == new for old, new in same)


def test_two_archives_share_nineteen_tensors_of_twenty(tmp_path: Path) -> None:
    first, tuned = transfer.archives(BlobFolder(tmp_path), transfer.TENSORS * 1000)
    weights = [{item.digest for item in archive.variant().weights} for archive in (first, tuned)]
    assert len(weights[0] & weights[1]) / len(weights[0]) == 0.95
