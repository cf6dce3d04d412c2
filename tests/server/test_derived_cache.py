"""The derived cache, as the user of a server sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.model_store import Store
from tests.runtime import large_models
from tests.server.test_lifecycle import running

METRIC = 'ingot_derived_cache_total{model="layers",result="%s",version="1"} 1.0'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with a model that is large enough."""
    home = tmp_path / "home"
    large_models.push(Store(home), width=1024, count=5)
    return home


def counted(client: ingot.Client) -> str:
    """Wait until the model has settled and return the cache's count."""
    for _ in range(100_000):
        metrics = client.metrics()
        for result in ("hit", "built", "failed"):
            if METRIC % result in metrics:
                return result
    pytest.fail("the model does not settle")


@pytest.mark.parametrize("isolate", ["none", "all"])
@pytest.mark.matrix
def test_servers_share_what_the_first_one_built(home: Path, isolate: str) -> None:
    x = np.ones((3, 1024), np.float32)
    answers = []
    for expected in ("built", "hit"):
        isolated = running("layers:1", "--isolate", isolate, home=home)
        with isolated as (_, addresses), ingot.Client(addresses["http"]) as client:
            client.infer("layers", {"x": x})
            assert counted(client) == expected
            answers.append(client.infer("layers", {"x": x})["y"])
            assert client.metadata("layers").get("properties", {}).get("isolation") == {"all": "process"}.get(isolate)
    plain = running("layers:1", "--no-derived-cache", home=home)
    with plain as (_, addresses), ingot.Client(addresses["http"]) as client:
        answers.append(client.infer("layers", {"x": x})["y"])
        assert "ingot_derived_cache_total{" not in client.metrics()
    assert (answers[0] == answers[1]).all()
    assert (answers[0] == answers[2]).all()


def test_a_server_without_it_leaves_the_store_alone(home: Path) -> None:
    with running("layers:1", "--no-derived-cache", home=home):
        pass
    assert not (home / "derived").exists()


@pytest.mark.matrix
def test_servers_that_start_together_share_one_entry(home: Path) -> None:
    with running("layers:1", home=home) as (_, first), running("layers:1", home=home) as (_, second):
        for addresses in (first, second):
            with ingot.Client(addresses["http"]) as client:
                assert counted(client) in ("built", "hit")
    assert len(list((home / "derived").glob("*/ort-*"))) == 1


@pytest.mark.matrix
def test_a_server_stops_while_it_fills_the_cache(home: Path) -> None:
    with running("layers:1", home=home) as (process, _):
        process.terminate()
        assert process.wait(30) == 0
