"""Archives of models in Python under a trust policy, and two versions of one: canary, rollback, other imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import Unsupported, Untrusted
from ingot.export.python_model import export_class
from ingot.model_store import Archive, Store
from ingot.model_store.trust import signing
from tests.model_store.signers import KEY, OTHER
from tests.server.outside import wait_until

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
CODE = """
import sys
{imports}

class Scale:
    inputs = ["x:float32[batch]"]
    outputs = ["y:float32[batch]", "torch:bool[batch]"]

    def predict(self, batch):
        return {{"y": batch["x"] * {factor}, "torch": ["torch" in sys.modules] * len(batch["x"])}}
"""
X = {"x": np.ones(1, np.float32)}


def source(folder: Path, name: str, factor: float = 1, imports: str = "") -> str:
    path = folder / f"{name}.py"
    path.write_text(CODE.format(factor=factor, imports=imports))
    return f"{path}:Scale"


def scale(folder: Path, factor: float) -> Archive:
    return export_class(source(folder, f"scale{factor:g}".replace(".", "_"), factor), name="scale")


def policy(folder: Path, more: str) -> Path:
    (folder / "team.pub").write_bytes(KEY.public.pem)
    path = folder / "trust.toml"
    path.write_text(f'[[rule]]\nnames = "**"\nkeys = ["team.pub"]\n{more}')
    return path


def test_a_rule_allows_the_code_that_its_keys_signed(tmp_path: Path) -> None:
    made = scale(tmp_path, 2)
    ours, theirs = (made.with_signature(signing.sign(made, made.name, key)) for key in (KEY, OTHER))
    with pytest.raises(Unsupported, match="--allow-code"):
        ingot.serve(ours, trust=policy(tmp_path, ""), **FREE)
    trust = policy(tmp_path, "allow_code = true\n")
    for refused in (made, theirs):
        with pytest.raises(Untrusted):
            ingot.serve(refused, trust=trust, **FREE)
    with ingot.serve(ours, trust=trust, **FREE) as server, ingot.Client(server.http_url) as client:
        assert client.infer("scale", X)["y"].tolist() == [2]
        assert client.metadata("scale")["properties"]["signed_by"] == KEY.public.keyid


@pytest.mark.matrix
def test_a_version_that_differs_is_rolled_back_and_a_good_one_takes_over(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for version, factor in (("1", 1), ("2", 1.0005), ("3", 1.1)):
        store.push(scale(tmp_path, factor), f"scale:{version}")
    store.promote("scale:1", "prod")
    plan: dict[str, Any] = {"canary": "0,50", "canary_every": "0s", "canary_drift": 1, "canary_compare": 100}
    with (
        ingot.serve("scale:prod", store=store, allow_code=True, **plan, **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        seen = set[float]()

        def asked(done: Any) -> Any:
            def check() -> bool:
                seen.add(round(float(client.infer("scale", X)["y"][0]), 4))
                return bool(done())

            return check

        store.promote("scale:3", "prod")
        wait_until(asked(lambda: server.status()[0]["update_failed"]))
        assert "was rolled back as a shadow" in server.status()[0]["update_failed"]
        assert seen == {1}
        store.promote("scale:2", "prod")
        wait_until(asked(lambda: server.status()[0]["digest"] == store.digest_of("scale", "2")))
        assert seen == {1, 1.0005}
        store.rollback("scale:prod")
        wait_until(asked(lambda: server.status()[0]["digest"] != store.digest_of("scale", "2")))


@pytest.mark.matrix
def test_one_model_imports_torch_and_another_does_not(tmp_path: Path) -> None:
    heavy, light = source(tmp_path, "heavy", imports="import torch"), source(tmp_path, "light", 3)
    sources = f"heavy={heavy}", f"light={light}"
    with ingot.serve(*sources, **FREE) as server, ingot.Client(server.http_url) as client:
        assert client.infer("heavy", X)["torch"].tolist() == [True]
        found = client.infer("light", X)
        assert (found["y"].tolist(), found["torch"].tolist()) == ([3], [False])
