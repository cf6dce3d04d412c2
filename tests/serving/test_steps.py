"""New versions of a model with steps: their raw goldens are replayed, and answers to raw requests are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.model_store import Store
from tests.server.outside import wait_until
from tests.server.test_steps import make
from tests.steps.bert import tokenizer_file

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Version 1 is prod; 2 has a tokenizer that makes other ids of its goldens; 3 names its labels otherwise."""
    store = Store(tmp_path / "store")
    other = tokenizer_file().replace(b'"a":', b'"aa":').replace(b'"fine":', b'"a":')
    store.push(make(tmp_path), "length:1")
    store.push(make(tmp_path, tokenizer=other), "length:2")
    store.push(make(tmp_path, labels=["MANY", "FEW"]), "length:3")
    store.promote("length:1", "prod")
    return store


def ask(server: RunningServer, text: str = "a fine film") -> str:
    """Return the best label over HTTP."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
    url = f"{server.http_url}/v2/models/length/infer"
    answer = httpx.post(url, json={"inputs": [tensor]}, trust_env=False).raise_for_status().json()
    [label] = [output["data"][0] for output in answer["outputs"] if output["name"] == "label"]
    return str(label)


def test_a_tokenizer_that_does_not_reproduce_the_goldens_never_takes_over(store: Store) -> None:
    with ingot.serve("length:prod", store=store, **FREE) as server:
        assert ask(server) == "LONG"
        store.promote("length:2", "prod")
        wait_until(lambda: bool(server.status()[0]["update_failed"]))
        failed = server.status()[0]["update_failed"]
        assert "does not reproduce its golden outputs" in failed
        assert "of the steps before golden case 0 departs" in failed
        assert ask(server) == "LONG"


def test_other_labels_take_over_with_their_goldens(store: Store) -> None:
    with ingot.serve("length:prod", store=store, **FREE) as server:
        store.promote("length:3", "prod")
        wait_until(lambda: ask(server) == "MANY")
        assert server.status()[0]["update_failed"] == ""


@pytest.mark.matrix
def test_other_labels_are_reported_by_a_shadow(store: Store) -> None:
    policy: dict[str, Any] = {"canary": "0,50", "canary_every": "1h", "canary_drift": 1, "canary_compare": 100}
    with ingot.serve("length:prod", store=store, **policy, **FREE) as server:
        store.promote("length:3", "prod")
        wait_until(lambda: server.status()[0].get("canary") is not None)

        def rolled_back() -> bool:
            assert ask(server) == "LONG"
            return bool(server.status()[0]["update_failed"])

        wait_until(rolled_back)
        assert "answers differ by more than" in server.status()[0]["update_failed"]
        assert ask(server) == "LONG"
