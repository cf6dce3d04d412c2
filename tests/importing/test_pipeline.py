"""From the files of other servers to archives, in Python."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import ingot
from ingot.errors import IngotError, InvalidArgument
from ingot.importing import Consent, candidates, convert
from ingot.model_store import Archive
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array
from tests import onnx_models
from tests.export.models import Net
from tests.importing.sources import CONFIG, PROGRAM, mar, torch_file, triton
from tests.support import ROOT, run_python

ROWS = "x:float32[batch,4]"
X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
CODE = (ROOT / "tests" / "export" / "models.py").read_text().partition("class Net")
EAGER = f"import torch\nfrom torch import nn\nclass Net{CODE[2].partition('net = ')[0]}".encode()


@pytest.fixture(scope="module")
def module() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    net.get_buffer("body.1.running_mean").add_(0.5)  # a buffer, which weights alone would lack
    return net


@pytest.fixture(autouse=True)
def path_as_before() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def answers(archive: Archive, inputs: dict[str, Array]) -> list[Array]:
    with closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
        return list(engine.run(inputs).values())


def expected(module: Net) -> Array:
    with torch.no_grad():
        return module(torch.from_numpy(X)).numpy()  # type: ignore[no-any-return]


def scripted(module: Net, path: Path) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module, torch.ones(2, 4)).save(str(path))  # type: ignore[no-untyped-call]
    return path.read_bytes()


def test_a_model_in_python_with_a_handler_by_consent(tmp_path: Path, module: Net) -> None:
    torch.save(module.state_dict(), tmp_path / "net.pth")
    files = {"net.pth": (tmp_path / "net.pth").read_bytes(), "model.py": EAGER, "handler.py": b"raise SystemExit(9)"}
    path = mar(tmp_path / "net.mar", files, serializedFile="net.pth", modelFile="model.py", handler="handler.py:serve")
    steps: list[str] = []
    with pytest.raises(InvalidArgument, match=r"has its own handler, 'handler.py:serve'"):
        ingot.import_model(path)
    with pytest.raises(InvalidArgument, match=r"handler.py cannot be imported: ExitRequested"):
        ingot.import_model(path, allow_code=True)
    with pytest.raises(InvalidArgument, match="allow it with --allow-code"):
        ingot.import_model(path, without_handler=True)
    with pytest.raises(InvalidArgument, match=r"the model.s inputs are not described; pass inputs \(--input\)"):
        ingot.import_model(path, without_handler=True, allow_code=True)
    archive = ingot.import_model(
        str(path), inputs=ROWS, without_handler=True, allow_code=True, name="team/net", progress=steps.append
    )
    assert archive.name == "team/net"
    assert steps[:2] == [f"Reading {path}", "Importing PyTorch"]
    assert np.allclose(answers(archive, {"x": X})[0], expected(module), atol=1e-5)
    assert any(
        "the handler handler.py:serve is not imported" in item for item in archive.variant().serving.provenance.notes
    )


@pytest.mark.matrix
def test_torchscript_of_triton_is_called_by_its_configuration(tmp_path: Path, module: Net) -> None:
    config = 'backend: "pytorch" max_batch_size: 4 input { name: "INPUT__0" data_type: TYPE_FP32 dims: 4 }'
    folder = triton(
        tmp_path / "net", config + 'output { name: "OUTPUT__0" }', {"1/model.pt": scripted(module, tmp_path / "a.pt")}
    )
    with pytest.raises(InvalidArgument, match=r"model.pt is TorchScript, a program, .*allow it with --allow-code"):
        ingot.import_model(folder)
    archive = ingot.import_model(folder, allow_code=True)
    assert archive.signature.batch == "batch"
    assert [spec.name for spec in archive.signature.outputs] == ["OUTPUT__0"]
    assert np.allclose(answers(archive, {"INPUT__0": X})[0], expected(module), atol=1e-5)
    assert [
        spec.name for spec in ingot.import_model(folder, output_names=["y"], allow_code=True).signature.outputs
    ] == ["y"]


@pytest.mark.matrix
def test_an_exported_program(tmp_path: Path, module: Net) -> None:
    torch.export.save(torch.export.export(module, (torch.from_numpy(X),)), tmp_path / "net.pt2")
    files = {"net.pt2": (tmp_path / "net.pt2").read_bytes()}
    archive = ingot.import_model(mar(tmp_path / "net.mar", files, serializedFile="net.pt2"), allow_code=True)
    assert np.allclose(answers(archive, {"x": X})[0], expected(module), atol=1e-5)


def test_an_onnx_graph_keeps_its_dimensions_and_its_examples(tmp_path: Path) -> None:
    archive = ingot.import_model(onnx_models.affine(tmp_path), {"x": X[:, :3]})
    assert archive.name == "affine"
    assert np.allclose(answers(archive, {"x": X[:, :3]})[0], 2 * X[:, :3] + 1)
    affine = onnx_models.affine(tmp_path).read_bytes()
    wrong = triton(tmp_path / "wrong", CONFIG.replace("[ 3 ]", "[ 5 ]"), {"1/model.onnx": affine})
    with pytest.raises(InvalidArgument, match=r"which does not fit the declared x:float32\[batch,5\]"):
        ingot.import_model(wrong)


@pytest.mark.matrix
def test_several_models_are_converted_one_by_one(tmp_path: Path) -> None:
    affine = onnx_models.affine(tmp_path).read_bytes()
    folder = triton(tmp_path / "affine", files={"1/model.onnx": affine, "2/model.onnx": affine})
    with pytest.raises(InvalidArgument, match=r"holds 2 models; import one at a time: .*affine/1, .*affine/2"):
        ingot.import_model(folder)
    with candidates(folder, Consent()) as found:
        archives = {item.version: convert(item) for item in found}
    assert sorted(str(version) for version in archives) == ["1", "2"]
    assert np.allclose(answers(archives["2"], {"x": X[:, :3]})[0], 2 * X[:, :3] + 1)


def test_messages_call_a_model_what_the_user_calls_it_and_nothing_stays_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"wrong": torch.ones(1)}, tmp_path / "net.pth")
    unknown = onnx.load(onnx_models.affine(tmp_path))
    unknown.graph.node[0].op_type = "NoSuchOperator"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for name, content, message in (
        ("net.pt", torch_file("net/constants.pkl", "net/code/a.py"), "'net.pt' in .* is not a TorchScript file"),
        ("net.pt2", torch_file(*PROGRAM), "'net.pt2' in .* does not contain an exported program"),
        ("net.pth", (tmp_path / "net.pth").read_bytes(), "the checkpoint 'net.pth' in .*net.mar does not fit Net"),
        ("net.onnx", unknown.SerializeToString(), "ONNX Runtime cannot load model.onnx: .*NoSuchOperator"),
    ):
        extra = {"modelFile": "model.py"} if name == "net.pth" else {}
        path = mar(tmp_path / "net.mar", {name: content, "model.py": EAGER}, serializedFile=name, **extra)
        with pytest.raises(IngotError, match=message) as raised:
            ingot.import_model(path, inputs=ROWS, allow_code=True)
        assert str(temporary) not in str(raised.value)
    assert list(temporary.glob("ingot-*")) == []


@pytest.mark.matrix
def test_finding_models_needs_no_pytorch() -> None:
    code = "import sys, ingot, ingot.importing; ingot.import_model; print({'torch', 'onnx_ir'} & set(sys.modules))"
    assert run_python(code) == "set()\n"
