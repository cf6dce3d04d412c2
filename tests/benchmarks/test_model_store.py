"""The benchmark of the store in small; the run itself takes minutes and is not a test."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.model_store import load, swaps, transfer
from benchmarks.model_store.common import BATCHES, Layers
from benchmarks.model_store.page import RESULTS, finish
from benchmarks.model_store.processes import check
from benchmarks.model_store.wire import Wire
from benchmarks.model_store.worker import WAYS
from ingot.model_store import BlobFolder
from ingot.runtime import EngineSpec, load_engine

SMALL = Layers(megabytes=1, width=256)
MEDIUM = Layers(megabytes=20, width=1024)  # large enough for the derived cache


def test_the_archive_and_the_file_hold_the_same_model(tmp_path: Path) -> None:
    archive = SMALL.archive(BlobFolder(tmp_path / "blobs"))
    archive.check_own()
    x = SMALL.inputs(3)
    answers = [
        load_engine(EngineSpec(path)).run({"x": x})["y"]
        for path in (SMALL.save(tmp_path / "m.onnx"), archive.variant().path())
    ]
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_allclose(answers[0], SMALL.answer(x), rtol=1e-3, atol=1e-4)
    assert SMALL.archive(BlobFolder(tmp_path / "again")).digest == archive.digest


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> load.Bench:
    return load.Bench(MEDIUM, tmp_path_factory.mktemp("bench"))


@pytest.mark.matrix
def test_a_worker_of_each_way_answers_as_the_file_does(bench: load.Bench) -> None:
    bench.start("ingot", "built").close()
    for way in (*WAYS, "early"):
        with closing(bench.start(way)) as worker:
            assert 0 < worker.seconds["loaded"] <= worker.seconds["first"] <= worker.seconds["settled"]
            assert worker.time(8) > 0


@pytest.mark.matrix
def test_a_load_without_a_cache_is_not_reported_as_cached(bench: load.Bench) -> None:
    bench.empty_cache()
    with pytest.raises(SystemExit, match="had 'built' where 'hit'"):
        bench.start("ingot")


@pytest.mark.matrix
def test_a_wrong_answer_ends_the_benchmark(bench: load.Bench) -> None:
    worker = bench.start("plain")
    with pytest.raises(SystemExit, match="differs"):
        check(worker, bench.expected + 1, None)


def test_the_page_of_loads_shows_ratios_per_round() -> None:
    lines = load.markdown({SMALL: _found()}, "machine").splitlines()
    assert "| archive | 0.50 (0.10-1.00) | 0.50 (0.10-1.00) | 0.50 (0.10-1.00) |" in lines
    assert "| archive, until packed weights serve | 2.00 | 2.00 | 2.00 | 2.00 |" in lines
    assert "| `ingot serve` | 1.10 | 1.50 |" in lines


@pytest.mark.parametrize("name", ["load", "transfer", "swaps"])
def test_the_page_that_is_kept_is_of_the_form_that_is_written(name: str) -> None:
    written = {
        "load": lambda: load.markdown({}, "machine"),
        "transfer": lambda: transfer.markdown(
            {way: [1.0] for way in transfer.WAYS},
            {client: [(0.05, 0.05)] for client in transfer.CLIENTS},
            300,
            "machine",
        ),
        "swaps": lambda: swaps.markdown({1: swaps.Found([1.0], [1.0], [1.0])}, 5, "machine"),
    }[name]()
    kept = [line for line in (RESULTS / f"{name}.md").read_text().splitlines() if not _of_the_run(line)]
    expected = [line for line in written.splitlines() if not _of_the_run(line)]
    assert kept[: len(expected)] == expected


def test_the_page_of_transfers_shows_ratios_per_round() -> None:
    times = {way: [1.0, 4.0] for way in transfer.WAYS} | {"ingot pull": [2.0, 2.0]}
    moved = {"skopeo": [(0.06, 0.05)], "ingot": [(0.05, 0.05), (0.07, 0.05)]}
    lines = transfer.markdown(times, moved, 300, "machine").splitlines()
    assert "| `ingot copy`, registry to store | 1.2 (0.5-2.0) | 1.25 (0.50-2.00) |" in lines
    assert "| `ingot copy` | 6.00 (5.00-7.00) | 5.00 |" in lines


def test_the_proxy_counts_what_clients_send() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Wire(server.getsockname()[1]) as wire,
        socket.create_connection(("127.0.0.1", wire.port), timeout=10) as client,
        wire.counted() as sent,
    ):
        client.sendall(b"hello")
        with server.accept()[0] as far:
            far.settimeout(10)
            assert far.recv(5) == b"hello"
            far.sendall(b"you there")
        assert client.recv(9, socket.MSG_WAITALL) == b"you there"
    assert (sent, wire.received) == ([5], 9)


def test_a_page_is_written_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish("a page", "x.md", None)
    assert capsys.readouterr().out == "a page\n"
    finish("a page", "x.md", tmp_path / "results")
    assert (tmp_path / "results" / "x.md").read_text() == "a page"


def _found() -> load.Found:
    base, half = dict.fromkeys(load.PHASES, 2.0), dict.fromkeys(load.PHASES, 1.0)
    rounds = {"protobuf": [base] * 3, "plain": [base] * 3, "ingot": [half, dict.fromkeys(load.PHASES, 0.2), base]}
    return load.Found(
        {way + state: items for way, items in rounds.items() for state in (load.WARM, load.COLD)}
        | {load.FIRST: [base] * 3},
        {way: {rows: [value] for rows in BATCHES} for way, value in {"protobuf": 1.0, "early": 2.0}.items()},
        {"served": [1.1]},
        {"served": [1.5]},
    )


def _of_the_run(line: str) -> bool:
    return line.startswith(("machine", "| ", "An archive of", "Processes move"))


def test_two_archives_share_nineteen_tensors_of_twenty(tmp_path: Path) -> None:
    first, tuned = transfer.archives(BlobFolder(tmp_path), transfer.TENSORS * 1000)
    weights = [{item.digest for item in archive.variant().weights} for archive in (first, tuned)]
    assert len(weights[0] & weights[1]) / len(weights[0]) == 0.95
