"""``ingot import`` as a user types it. Reading sources and writing archives is tested in tests/importing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from ingot.cli.main import app
from ingot.errors import AlreadyExists, IngotError
from ingot.model_store import Archive, Store
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array
from tests import onnx_models
from tests.export.models import Net
from tests.importing.sources import CONFIG, PROGRAM, mar, torch_file, triton
from tests.support import ROOT, RunIngot

ROWS = "x:float32[batch,4]"
X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def module() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def script(module: Net, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("script") / "net.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, torch.ones(2, 4)).save(str(path))  # type: ignore[no-untyped-call]
    return path.read_bytes()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test, which is the current one of commands that run in this process too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INGOT_HOME", str(tmp_path / "home"))
    return tmp_path


def imported(*arguments: str) -> Result:
    """Run the command in this process, where PyTorch is loaded already."""
    return CliRunner().invoke(app, ["import", *arguments])


def refused(*arguments: str) -> str:
    result = imported(*arguments)
    assert isinstance(result.exception, IngotError), result.output
    assert result.stdout == ""
    assert "/ingot-" not in str(result.exception), "a temporary file is nothing that a user knows"
    return str(result.exception)


def answers(archive: Archive, inputs: dict[str, Array]) -> list[Array]:
    unpacked = archive.unpacked()
    with closing(load_engine(EngineSpec(unpacked.variant().path(), device="cpu"))) as engine:
        return list(engine.run(inputs).values())


def expected(module: Net) -> Array:
    with torch.no_grad():
        return module(torch.from_numpy(X)).numpy()  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_torchserves_archive_becomes_a_version_with_its_labels(
    run_ingot: RunIngot, here: Path, module: Net, script: bytes
) -> None:
    model = {"modelName": "Net", "modelVersion": "1.0", "serializedFile": "net.pt", "handler": "base_handler"}
    mar(here / "net.mar", {"net.pt": script, "index_to_name.json": b'{"0": "cat"}', "report.json": b"{}"}, **model)
    result = run_ingot("import", "net.mar", "--allow-code", "--input", ROWS, "--output-name", "logits")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("net:1.0  sha256:")
    assert "logits: equals the original in " in result.stderr
    assert "note: TorchServe's handler base_handler is not imported: clients must send tensors" in result.stderr
    archive = Store().get("net:1.0")
    archive.verify()
    assert np.allclose(answers(archive, {"x": X})[0], expected(module), atol=1e-5)
    assert archive.signature.batch == "batch"
    variant = archive.variant()
    assert variant.goldens()
    assert variant.document("imported/index_to_name.json") == b'{"0": "cat"}'
    assert variant.document("imported/report.json") == b"{}"
    assert json.loads(variant.document("report.json") or b"")["name"] == "net"
    assert variant.serving.provenance.source == "net.mar"
    handler, labels = variant.serving.provenance.notes[-2:]
    assert handler.startswith("TorchServe's handler")
    assert labels.startswith("labels are not imported: the labels are 1 names, and output 'logits' has 3 classes")
    again = run_ingot("import", "net.mar")
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr == (
        "'Net' is stored as 'net'\n"
        "error: 'net:1.0' is in the store already, and a version never changes; import as another, such as net:2\n"
    )


@pytest.mark.matrix
def test_an_archive_file_and_the_notes_as_json(here: Path) -> None:
    onnx_models.affine(here)
    model = {"serializedFile": "affine.onnx", "handler": "handler.py:serve"}
    mar(here / "net.mar", {"affine.onnx": (here / "affine.onnx").read_bytes(), "handler.py": b""}, **model)
    np.savez(here / "x.npz", x=X[:, :3])
    result = imported("net.mar", "--without-handler", "-o", "net.ingot", "--example", "x.npz", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    archive = Archive.open(here / "net.ingot")
    assert np.allclose(answers(archive, {"x": X[:, :3]})[0], 2 * X[:, :3] + 1)
    assert printed["skipped"] == printed["failed"] == []
    (done,) = printed["imported"]
    assert (done["source"], done["reference"], done["file"]) == ("net.mar", None, "net.ingot")
    assert done["digest"] == archive.digest
    assert any("the handler handler.py:serve is not imported" in item for item in done["notes"])


def test_tritons_repository_becomes_tags(here: Path, module: Net, script: bytes) -> None:
    affine = onnx_models.affine(here).read_bytes()
    triton(here / "repo" / "affine", files={"1/model.onnx": affine, "3/model.onnx": affine})
    config = 'backend: "pytorch" max_batch_size: 4 input { name: "INPUT__0" data_type: TYPE_FP32 dims: 4 }'
    triton(here / "repo" / "Net", config + 'output { name: "OUTPUT__0" }', {"1/model.pt": script})
    triton(here / "repo" / "all", 'platform: "ensemble"', {})
    wrong = CONFIG.replace("[ 3 ]", "[ 5 ]")
    triton(here / "repo" / "wrong", wrong, {"1/model.onnx": affine})
    first = imported("repo", "--json", "--allow-code")
    printed = json.loads(first.stdout)
    assert [item["reference"] for item in printed["imported"]] == ["net:1", "affine:1", "affine:3"]
    assert [item.partition(":")[0] for item in printed["failed"]] == ["repo/all", "repo/wrong/1"]
    message = "2 of 5 models were not imported. repo/all: the model repo/all uses Triton's backend 'ensemble'"
    assert message in str(first.exception)
    assert "is x:float32[batch,3], which does not fit the declared x:float32[batch,5]" in str(first.exception)
    store = Store()
    assert np.allclose(answers(store.get("net:1"), {"INPUT__0": X})[0], expected(module), atol=1e-5)
    assert np.allclose(answers(store.get("affine"), {"x": X[:, :3]})[0], 2 * X[:, :3] + 1)

    again = imported("repo/affine", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == {
        "imported": [],
        "skipped": ["affine:1", "affine:3"],
        "failed": [],
        "pipelines": "",
    }
    one = imported("repo/affine/3", "team/affine:prod")
    assert one.exit_code == 0, one.output
    assert store.get("team/affine:prod").name == "team/affine"


def test_an_onnx_file_becomes_the_next_version(here: Path) -> None:
    onnx_models.affine(here)
    for version in (1, 2):
        result = imported("affine.onnx")
        assert result.stdout.startswith(f"affine:{version}  sha256:"), result.output
    assert isinstance(imported("affine.onnx", "affine:2").exception, AlreadyExists)
    assert np.allclose(answers(Store().get("affine:2"), {"x": X[:, :3]})[1], -X[:, :3])
    (here / "affine.onnx").rename(here / "MyNet.onnx")
    result = imported("MyNet.onnx")
    assert result.stdout.startswith("mynet:1 ")


@pytest.mark.matrix
def test_a_reference_and_a_file_for_one_model_each(here: Path) -> None:
    triton(here / "repo" / "a", files={"1/model.onnx": b"", "2/model.onnx": b""})
    triton(here / "repo" / "b")
    for arguments, message in (
        (
            ["repo", "-o", "a.ingot"],
            "holds 3 models, which cannot all have one target; name one: repo/a/1, repo/a/2, repo/b/1",
        ),
        (["repo/a", "x:1"], "holds 2 models, which cannot all have one target; name one: repo/a/1, repo/a/2"),
        (["repo", "x"], "have different names and cannot all be 'x'"),
        (["repo/b", "x:1", "-o", "a.ingot"], "goes to the store or to a file; leave out the reference, or --out"),
        (["repo/b", "x:1#fp32"], "'x:1#fp32' is not a target of copies; write name:tag"),
        (["repo/b", "oci://host/x:1"], "'oci://host/x:1' is in a registry; import into the store, then: ingot copy"),
        (["repo/b", "-o", "no/a.ingot"], "there is no folder no"),
        (["repo/b", "x:1"], "ONNX Runtime cannot load model.onnx: Protobuf parsing failed"),
    ):
        assert message in refused(*arguments)


@pytest.mark.matrix
def test_code_runs_only_by_consent_of_an_option_or_a_variable(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mar(here / "net.mar", {"net.pt2": torch_file(*PROGRAM)}, serializedFile="net.pt2")
    (here / "net.pt2").write_bytes(torch_file(*PROGRAM))
    for command in (["import", "net.mar"], ["export", "net.pt2", "-o", "net.ingot"]):
        monkeypatch.delenv("INGOT_ALLOW_CODE", raising=False)
        refusal = str(CliRunner().invoke(app, command).exception)
        assert "; if you trust its source, allow " in refusal
        assert "--allow-code" in refusal
        assert "contain an exported program" in str(CliRunner().invoke(app, [*command, "--allow-code"]).exception)
        monkeypatch.setenv("INGOT_ALLOW_CODE", "1")
        assert "contain an exported program" in str(CliRunner().invoke(app, command).exception)


def test_versions_that_are_not_tags(run_ingot: RunIngot, here: Path) -> None:
    mar(here / "net.mar", {}, modelVersion="1 final\x1b")
    result = run_ingot("import", "net.mar")
    assert r"the version '1 final\x1b' of net.mar cannot be a tag; give the target, such as net:1" in result.stderr


SLOW = b"""
import time
import torch
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        print("running", flush=True)
        time.sleep(0.5)
        return x * self.weight
"""


@pytest.mark.matrix
def test_an_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1)}, tmp_path / "slow.pth")
    files = {"slow.pth": (tmp_path / "slow.pth").read_bytes(), "slow.py": SLOW}
    mar(tmp_path / "slow.mar", files, serializedFile="slow.pth", modelFile="slow.py")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(ROOT),
        "INGOT_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-m", "ingot", "import", "slow.mar", "--allow-code", "--input", ROWS]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert not (tmp_path / "home").exists()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("ingot-")] == []
