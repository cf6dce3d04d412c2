"""Model names with upper case, as files, stores, registries, policies and clients treat them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.errors import NotFound, Untrusted
from ingot.model_store import Archive, Store
from tests import onnx_models
from tests.runtime.variants import Made, X, archive
from tests.support import RunIngot, refused, succeeded

DOUBLE = archive([Made("fp32")])
ROW = np.ones((1, 3), np.float32)


def serve(*sources: str, store: Path | None = None, trust: Path | None = None) -> RunningServer:
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu", "choice_time": 0.01}
    return ingot.serve(*sources, store=None if store is None else Store(store), trust=trust, **settings)


def answering(server: RunningServer, names: Sequence[str], wrong: Sequence[str] = ()) -> None:
    """Check that models answer over both protocols under these names, and under no other."""
    for url in (server.http_url, server.grpc_url):
        with ingot.Client(url) as client:
            for name in names:
                [spec] = client.metadata(name)["inputs"]
                row = X if spec["shape"][-1] == X.shape[-1] else ROW
                assert client.infer(name, {"x": row})["y"].shape == row.shape
            for name in wrong:
                with pytest.raises(NotFound, match=f"unknown model: '{name}' is not found; this server has: "):
                    client.infer(name, {"x": ROW})


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("file", "served", "other"),
    [("simple_string", "simple_string", "simple-string"), ("MyNet", "MyNet", "mynet"), ("My Net", "My-Net", "my-net")],
)
def test_a_served_file_is_called_as_it_is(tmp_path: Path, file: str, served: str, other: str) -> None:
    with serve(str(onnx_models.affine(tmp_path, file))) as server:
        assert server.models == [served]
        answering(server, [served], [other])


@pytest.mark.matrix
def test_the_name_of_a_served_model_is_the_one_in_the_command(run_ingot: RunIngot, tmp_path: Path) -> None:
    DOUBLE.save(tmp_path / "x.ingot")
    pushed = run_ingot("copy", "x.ingot", "team/MyNet:1")
    assert succeeded(pushed) == f"team/mynet:1  {DOUBLE.digest}\n"
    assert pushed.stderr.splitlines()[0] == "'team/MyNet' is stored as 'team/mynet'"
    again = run_ingot("copy", "x.ingot", "team/mynet:1")
    assert "stored as" not in again.stderr
    sources = ["team/MyNet:1", "team/mynet:1", "MYNET=x.ingot"]
    sources = [source.replace("x.ingot", str(tmp_path / "x.ingot")) for source in sources]
    with serve(*sources, store=tmp_path / "home") as server:  # names that differ in case are different names here
        assert sorted(server.models) == ["MYNET", "MyNet", "mynet"]
        answering(server, ["MYNET", "MyNet", "mynet"], ["Mynet"])
        asked = run_ingot("infer", server.http_url, "MyNet", "--input", f"x={X.tolist()}")
        assert "y float32 [1, 256]" in succeeded(asked)


@pytest.mark.matrix
def test_both_spellings_find_the_stored_model(run_ingot: RunIngot, tmp_path: Path) -> None:
    DOUBLE.save(tmp_path / "x.ingot")
    succeeded(run_ingot("copy", "x.ingot", "MyNet:1"))
    succeeded(run_ingot("store", "promote", "MyNet:1", "Prod"))
    succeeded(run_ingot("copy", "MyNet:1", "Other_Net:1"))
    for name in ("MyNet", "mynet"):
        assert f"mynet:1  {DOUBLE.digest}\n" in succeeded(run_ingot("store", "list", name))
        assert [move["tag"] for move in json.loads(succeeded(run_ingot("store", "history", name, "--json")))] == [
            "Prod",
            "1",
        ]
        assert DOUBLE.digest in succeeded(run_ingot("inspect", f"{name}:Prod"))
    assert sorted(Store(tmp_path / "home").names()) == ["mynet", "other_net"]
    assert "has no 'mynet:prod'" in refused(run_ingot("inspect", "MyNet:prod"))  # tags keep their case


@pytest.mark.matrix
def test_a_registry_has_the_name_in_lower_case(run_ingot: RunIngot, tmp_path: Path, registry: str) -> None:
    DOUBLE.save(tmp_path / "x.ingot")
    assert succeeded(run_ingot("copy", "x.ingot", f"{registry}/Names/MyNet:1")).startswith(f"{registry}/names/mynet:1 ")
    for name in ("Names/MyNet", "names/mynet"):
        assert DOUBLE.digest in succeeded(run_ingot("store", "list", f"{registry}/{name}"))
    with serve(f"{registry}/Names/MyNet:1", store=tmp_path / "home") as server:
        answering(server, ["MyNet"], ["mynet"])
    assert succeeded(run_ingot("copy", f"{registry}/Names/MyNet:1")).startswith("names/mynet:1 ")


@pytest.mark.matrix
def test_exports_and_imports_are_stored_in_lower_case(run_ingot: RunIngot, tmp_path: Path) -> None:
    onnx_models.affine(tmp_path, "MyNet")
    exported = run_ingot("export", "MyNet.onnx", "--name", "OtherNet", "-o", "x.ingot")
    assert "'OtherNet' is stored as 'othernet'" in exported.stderr
    assert succeeded(exported).startswith("x.ingot: othernet")
    assert Archive.open(tmp_path / "x.ingot").name == "othernet"
    assert succeeded(run_ingot("import", "MyNet.onnx")).startswith("mynet:1 ")
    imported = run_ingot("import", "MyNet.onnx", "Third_Net:7")
    assert succeeded(imported).startswith("third_net:7 ")
    assert "'Third_Net' is stored as 'third_net'" in imported.stderr
    assert "'Th\u0131rd' cannot name a model" in refused(
        run_ingot("export", "MyNet.onnx", "--name", "Th\u0131rd", "-o", "y.ingot")
    )


@pytest.mark.matrix
def test_rules_and_signatures_count_for_every_spelling(run_ingot: RunIngot, tmp_path: Path) -> None:
    succeeded(run_ingot("trust", "keygen"))
    policy = tmp_path / "trust.toml"
    free = '[[rule]]\nnames = "Scratch*"\nrequire_signature = false\n'
    policy.write_text(free + '[[rule]]\nnames = "**"\nkeys = ["ingot.pub"]\n')
    DOUBLE.save(tmp_path / "x.ingot")
    file = str(onnx_models.affine(tmp_path, "MyNet"))
    for source in (file, f"PROD={file}", f"Prod={tmp_path / 'x.ingot'}"):
        with pytest.raises(Untrusted, match="is not trusted by"):
            serve(source, trust=policy)
    with serve(f"SCRATCH={file}", trust=policy) as server:
        answering(server, ["SCRATCH"])
    succeeded(run_ingot("copy", "x.ingot", "MyNet:1"))
    assert "it is unsigned" in refused(run_ingot("trust", "verify", "mynet:1", "--trust", policy))
    assert succeeded(run_ingot("trust", "sign", "MyNet:1", "--key", "ingot.key")).startswith("mynet ")
    for name in ("MyNet", "mynet"):
        succeeded(run_ingot("trust", "verify", f"{name}:1", "--trust", policy))
    with serve("MyNet:1", store=tmp_path / "home", trust=policy) as server:
        answering(server, ["MyNet"])
