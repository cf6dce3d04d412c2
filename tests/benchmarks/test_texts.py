"""The benchmarks of texts of real lengths in small; the runs themselves take minutes and are not tests."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import numpy as np
import pytest

import ingot
from benchmarks.scheduler_sim import lengths
from benchmarks.texts import corpus, loads, servers
from benchmarks.texts.servers import Server
from ingot.deploy.capacity.simulation import Loop, Simulation
from tests.server import test_apis


@pytest.mark.matrix
@pytest.mark.parametrize("engine", lengths.PROFILES)
def test_batches_by_cost_are_as_fast_as_classes_and_faster_than_by_count(engine: str) -> None:
    choose = random.Random(1)
    drawn = [min(256, int(choose.lognormvariate(3.4, 1))) + 2 for _ in range(1500)]
    found = {}
    for policy in ("cost", "classes", "count"):
        calls = lengths.Calls(*lengths.PROFILES[engine], divided=policy == "classes")
        made = lengths.policies(calls)[policy]()
        found[policy] = Simulation(made, calls).closed(Loop(32, 0.0002, len(drawn), lengths=drawn)).throughput
    assert found["cost"] > 0.97 * found["classes"]
    assert found["cost"] > 1.2 * found["count"]


def test_docstrings_are_different_texts_in_the_same_order() -> None:
    texts = corpus.docstrings()
    assert len(texts) == len(set(texts)) > 1000
    corpus.docstrings.cache_clear()
    assert corpus.docstrings() == texts


def test_vectors_are_read_in_both_forms() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    forms = [[row.tolist() for row in rows], [base64.b64encode(row.tobytes()).decode() for row in rows]]
    for form in forms:
        data = [{"index": index, "embedding": given} for index, given in reversed(list(enumerate(form)))]
        assert np.array_equal(servers.vectors(json.dumps({"data": data}).encode()), rows)


def test_clients_are_answered_and_a_wrong_answer_ends_the_run(tmp_path: Path) -> None:
    test_apis.table(tmp_path).save(tmp_path / "minilm.ingot")
    server = Server("ingot")
    with ingot.serve(f"minilm={tmp_path / 'minilm.ingot'}", http_port=0, grpc_port=0) as running:
        port = int(running.http_url.rpartition(":")[2])
        body = server.body(["a fine film", "a"])
        found = loads.run(port, server.path, [loads.Mix(2, [body] * 2, 2), loads.Mix(1, [body], 2)], 0.3)
        assert found.texts == 2 * sum(map(len, found.times))
        assert all(found.times)
        with pytest.raises(SystemExit, match="404"):
            loads.run(port, "/v1/nothing", [loads.Mix(1, [body], 2)], 0.3)
