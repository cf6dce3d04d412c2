"""A server of models in registries, served from copies in its store under their full names."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import Client, RunningServer
from ingot.errors import AlreadyExists, NotFound, Unavailable
from ingot.model_store import Archive, RegistryAddress, Store
from ingot.model_store.references import pulled_name
from ingot.model_store.registry import Registry, Retries
from tests.model_store.registry.proxy import Fault, Server, serving
from tests.runtime.variants import Made, X, archive
from tests.support import ROOT

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu", "choice_time": 0.01}
ONE, TWO = archive([Made("fp32")]), archive([Made("fp32"), Made("int8", 2)])


@pytest.fixture
def proxy(registry: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Another registry with the same content, which can be switched off."""
    monkeypatch.setattr("ingot.model_store.registry.client.Retries", lambda: Retries(tries=1))
    with serving(upstream=int(registry.rpartition(":")[2])) as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def serve(source: str, store: Store) -> RunningServer:
    return ingot.serve(source, store=store, **FREE)


def switch_off(proxy: Server) -> None:
    proxy.faults = [Fault("", times=1000, status=503)]


def kept(address: str, name: str) -> str:
    return pulled_name(RegistryAddress.parse(address), name)


def push(registry: str, reference: str, item: Archive) -> None:
    Registry(registry).push(item, reference)


@pytest.mark.matrix
def test_the_names_of_the_user_stay_as_they_are(registry: str, proxy: Server, store: Store) -> None:
    store.push(TWO, "served/own:prod")
    store.push(TWO, "served/own:1")
    for tag in ("prod", "1"):
        push(registry, f"served/own:{tag}", ONE)
    sources = [f"{registry}/served/own:prod", f"{registry}/served/own:1", f"other={proxy.address}/served/own:1"]
    with ingot.serve(*sources, "local=served/own:1", store=store, **FREE) as server:
        assert server.models == ["local", "other", "own"]
        with Client(server.http_url) as client:
            assert np.allclose(client.infer("own", {"x": X})["y"], 2 * X)
    assert store.tags("served/own") == {"prod": TWO.digest, "1": TWO.digest}
    assert store.tags(kept(registry, "served/own")) == {"prod": ONE.digest, "1": ONE.digest}
    assert store.tags(kept(proxy.address, "served/own")) == {"1": ONE.digest}


@pytest.mark.matrix
@pytest.mark.parametrize("suffix", [":1", ":1@{digest}", "@{digest}", ":1#fp32"])
def test_immutable_references_are_served_while_the_registry_is_away(
    registry: str, proxy: Server, store: Store, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    push(registry, "served/fixed:1", ONE)
    source = f"{proxy.address}/served/fixed{suffix.format(digest=ONE.digest)}"
    with serve(source, store):
        pass
    switch_off(proxy)
    with serve(source, store) as server:
        assert server.models == ["fixed"]
    assert f"serving {kept(proxy.address, 'served/fixed')}:1, which is the same, from the store" in caplog.text


@pytest.mark.parametrize("suffix", [":prod", ""])
def test_mutable_tags_are_not_served_but_their_copy_is_named(
    registry: str, proxy: Server, store: Store, suffix: str
) -> None:
    push(registry, "served/moving:prod", ONE)
    source = f"{proxy.address}/served/moving{suffix}"
    switch_off(proxy)
    with pytest.raises(Unavailable, match="answers 503") as caught:
        serve(source, store)
    assert "earlier pull" not in str(caught.value)
    proxy.faults = []
    with serve(source, store):
        pass
    switch_off(proxy)
    copy = f"{kept(proxy.address, 'served/moving')}:prod"
    with pytest.raises(Unavailable, match=f"the archive that '.*' was at an earlier pull: ingot serve {copy}"):
        serve(source, store)
    with serve(copy, store) as server:
        assert server.models == ["moving"]


@pytest.mark.matrix
def test_an_alias_follows_the_registry_and_a_version_that_was_changed_there_is_refused(
    registry: str, proxy: Server, store: Store
) -> None:
    for reference in ("served/changed:prod", "served/forged:1"):
        push(registry, reference, ONE)
    for source in ("changed:prod", "forged:1"):
        with serve(f"{registry}/served/{source}", store):
            pass
    push(registry, "served/changed:prod", TWO)
    with serve(f"{registry}/served/changed:prod", store):
        assert store.tags(kept(registry, "served/changed")) == {"prod": TWO.digest}
    Registry(registry).remove("served/forged:1")
    push(registry, "served/forged:1", TWO)
    copy = kept(registry, "served/forged")
    with pytest.raises(AlreadyExists, match=f"was {ONE.digest} at an earlier pull, .*: ingot serve {copy}:1"):
        serve(f"{registry}/served/forged:1", store)


def test_models_removed_from_the_registry_are_not_served_from_a_copy(registry: str, store: Store) -> None:
    push(registry, "served/gone:1", ONE)
    with serve(f"{registry}/served/gone:1", store):
        pass
    Registry(registry).remove("served/gone:1")
    with pytest.raises(NotFound, match=f"{registry} has no"):
        serve(f"{registry}/served/gone:1", store)


@pytest.mark.matrix
def test_the_command_reports_that_it_pulls(registry: str, tmp_path: Path) -> None:
    name = f"{registry}/served/pulled:1"
    push(registry, "served/pulled:1", ONE)
    command = [sys.executable, "-m", "ingot", "serve", name, "--store", str(tmp_path / "store")]
    command += ["--http-port", "0", "--grpc-port", "0", "--device", "cpu", "--json"]
    log = tmp_path / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, env=os.environ
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert log.read_text() == f"Pulling {name}\n"
    assert [(model["name"], model["version"]) for model in json.loads(line)["models"]] == [("pulled", "1")]


@pytest.mark.matrix
def test_servers_that_share_a_store_download_a_model_once(proxy: Server, registry: str, tmp_path: Path) -> None:
    """As the pods of a node do that start together."""
    push(registry, "served/shared:1", TWO)
    command = [sys.executable, "-m", "ingot", "serve", f"{proxy.address}/served/shared:1", "--store", str(tmp_path)]
    command += ["--http-port", "0", "--grpc-port", "0", "--device", "cpu", "--json", "--management", "off"]
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            for _ in range(2)
        ]
        for process in started:
            running.callback(process.terminate)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["models"][0]["name"] == "shared"
    for variant in TWO.variants:
        assert len(proxy.asked(f"GET .*/blobs/{variant.graph.digest}")) == 1
