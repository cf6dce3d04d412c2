"""PyTorch programs: lowered, loaded and run."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ingot.config import ServerConfig
from ingot.errors import ExportError, InternalError, InvalidArgument, Unsupported
from ingot.export.capture import recurrent
from ingot.export.lower import program as lower_program
from ingot.export.lower.packed import precision_of
from ingot.model_store import BlobFolder
from ingot.runtime import EngineSpec, Settings, load_engine
from ingot.serving import Repository
from ingot.tensors import DType
from tests.export.programs import Lowered, Returning, archive, capture, shared
from tests.support import ROOT, run_python


class Many(nn.Module):
    """Two inputs, three outputs of different datatypes, and an operator that changes its tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu_(self.norm(self.embed(ids)) + shift[:, None, None])
        return {"logits": self.out(hidden), "small": hidden.bfloat16(), "zero": hidden == 0}


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(x)  # type: ignore[no-any-return]


class Fixed(nn.Module):
    """Fails in the engine on values that no check of shapes can see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x != 7).all())
        return x + 1


@torch.library.custom_op("ingot_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ingot_tests::sorted", mutates_args=())
def sorted_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sort(x.numpy()))


@sorted_by_numpy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def __init__(self, operator: object):
        super().__init__()
        self.operator = operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x) + 1  # type: ignore[operator, no-any-return]


def lowered(module: nn.Module, *inputs: str, decompose: bool = False) -> Lowered:
    case, blobs = capture(module, *inputs), BlobFolder.scratch()
    return Lowered(case, lower_program.pack(case.program, blobs, decompose=decompose), blobs)


@pytest.fixture(scope="module")
def many() -> Lowered:
    return lowered(Many(), "ids:int64[batch,seq=1..40]", "shift:float32[batch]")


class TestOneProgram:
    @pytest.mark.matrix
    def test_it_answers_as_the_model_at_any_sizes(self, many: Lowered) -> None:
        assert set(many.errors()) == {"logits", "small", "zero"}

    @pytest.mark.matrix
    def test_it_runs_in_a_confined_process(self, many: Lowered, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        model = Repository(settings=Settings(device="cpu", allow_code=True)).add(archive(many))
        model.load()  # which replays the golden
        assert model.properties["isolation_reason"] == "its format pt2 can run its author's code"
        assert "model model runs in an engine process, since its format pt2" in caplog.text
        model.close()

    @pytest.mark.matrix
    def test_the_file_declares_its_inputs_and_outputs(self, many: Lowered) -> None:
        engine = many.engine()
        assert engine.signature == many.case.program.signature
        assert (engine.device, engine.platform) == ("cpu", "torch_export")

    def test_inputs_of_a_request_are_read_in_place_and_never_written(self, many: Lowered) -> None:
        raw = np.zeros((2, 3), np.int64).tobytes()
        ids = np.frombuffer(raw, np.int64).reshape(2, 3)
        answer = many.engine().run({"ids": ids, "shift": np.ones(2, np.float32)[::-1]})
        assert answer["small"].dtype == DType.BF16.numpy
        assert ids.tobytes() == raw

    def test_inputs_that_do_not_fit_are_the_callers_fault(self, many: Lowered) -> None:
        engine, shift = many.engine(), np.ones(2, np.float32)
        for ids, says in (
            (np.zeros((3, 3), np.int64), "'batch' is 3 in input 'ids' but|'batch' is 2 in input 'shift' but"),
            (np.zeros((2, 41), np.int64), "1..40"),
            (np.full((2, 3), 10, np.int64), "rejects this input: index out of range"),
        ):
            with pytest.raises(InvalidArgument, match=says):
                engine.run({"ids": ids, "shift": shift})

    def test_an_answer_may_be_written_into(self) -> None:
        assert shared(lowered(Returning(), "x:float32[batch=1..64,3]").engine()) == set()

    def test_it_leaves_the_number_of_threads_as_it_was(self, many: Lowered) -> None:
        before = torch.get_num_threads()
        engine = many.engine(threads=before + 1)
        engine.run({"ids": np.zeros((1, 1), np.int64), "shift": np.ones(1, np.float32)})
        assert torch.get_num_threads() == before

    def test_it_contains_neither_the_authors_code_nor_example(self, many: Lowered) -> None:
        with zipfile.ZipFile(many.blobs.path(many.packed.graph)) as file:
            content = b"".join(file.read(name) for name in file.namelist())
            (example,) = (file.read(name) for name in file.namelist() if "sample_inputs" in name)
        assert str(ROOT).encode() not in content
        assert b"hidden" not in content
        assert example == b""

    def test_its_precision_is_that_of_most_of_its_weights(self, many: Lowered) -> None:
        assert precision_of(many.case.program) == "fp32"
        assert precision_of(capture(nn.Linear(2, 2).bfloat16(), "x:bfloat16[2]").program) == "bf16"
        assert precision_of(capture(Inverse(), "x:float64[2,2]").program) == "fp64"


@pytest.mark.matrix
def test_decomposed_it_holds_core_operators_only(tmp_path: Path) -> None:
    case = capture(Many(), "ids:int64[batch,seq]", "shift:float32[batch]")
    path = lower_program.lower(case.program, tmp_path / "core.pt2", decompose=True)
    graph = torch.export.load(path).graph
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert len(targets) > 5
    assert [str(item) for item in targets if torch.Tag.core not in item.tags and "assert" not in str(item)] == []
    blobs = BlobFolder.scratch()
    assert Lowered(case, lower_program.pack(case.program, blobs, decompose=True), blobs).errors()["logits"] < 1e-6


def test_values_that_an_operator_refuses_are_the_callers_fault_and_other_failures_ours() -> None:
    engine = lowered(Inverse(), "x:float32[batch,2,2]").engine()
    assert engine.run({"x": 2 * np.eye(2, dtype=np.float32)[None]})["output"].tolist() == [[[0.5, 0], [0, 0.5]]]
    with pytest.raises(InvalidArgument, match="singular"):
        engine.run({"x": np.zeros((1, 2, 2), np.float32)})
    engine = lowered(Fixed(), "x:float32[batch]").engine()
    with pytest.raises(InternalError, match="the engine failed"):
        engine.run({"x": np.array([7], np.float32)})


class TestOwnOperators:
    @pytest.mark.matrix
    def test_an_operator_made_of_pytorch_runs_without_its_source(self) -> None:
        made = lowered(Custom(halved), "x:float32[batch]")
        assert made.packed.requires == {"engine": "torch", "torch": made.packed.requires["torch"]}
        assert made.errors()["output"] == 0
        path = made.blobs.path(made.packed.graph)
        code = "import numpy as np, pathlib; from ingot.runtime import EngineSpec, load_engine\n"
        code += f"engine = load_engine(EngineSpec(pathlib.Path({str(path)!r}), format='pt2', allow_code=True))\n"
        code += "print(engine.run({'x': np.ones(2, np.float32)})['output'])"
        assert run_python(code) == "[1.5 1.5]\n"

    @pytest.mark.matrix
    def test_another_one_is_named_wherever_it_is_missing(self) -> None:
        made = lowered(Custom(sorted_by_numpy), "x:float32[batch]")
        assert made.errors()["output"] == 0
        assert made.packed.requires["operators"] == "ingot_tests::sorted"
        assert "imported the code that defines ingot_tests::sorted" in made.packed.notes[0]
        path = made.blobs.path(made.packed.graph)
        code = "import pathlib; from ingot.runtime import EngineSpec, load_engine\n"
        code += f"load_engine(EngineSpec(pathlib.Path({str(path)!r}), format='pt2', allow_code=True))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "Unsupported: the model needs the operator ingot_tests::sorted" in result.stderr

    @pytest.mark.matrix
    def test_one_that_only_this_program_defines_runs_in_this_process(self, caplog: pytest.LogCaptureFixture) -> None:
        made = archive(lowered(Custom(sorted_by_numpy), "x:float32[batch]"))
        model = Repository(settings=Settings(device="cpu", allow_code=True)).add(made)
        model.load()
        assert "isolation" not in model.properties
        assert (
            "runs in this process, since an engine process cannot open it: the model needs the operator" in caplog.text
        )
        model.close()
        strict = Repository(settings=Settings(device="cpu", allow_code=True, isolate="all")).add(made)
        with pytest.raises(Unsupported, match="needs the operator ingot_tests::sorted"):
            strict.load()

    @pytest.mark.matrix
    def test_one_whose_body_fixes_a_dimension_is_left_to_onnx(self) -> None:
        layer = nn.GRU(2, 3)
        with recurrent.opaque():
            fixed = capture(layer, "x:float32[5,batch,2]", "h:float32[1,batch,3]")
            free = capture(layer, "x:float32[length,batch,2]", "h:float32[1,batch,3]")
        blobs = BlobFolder.scratch()
        assert Lowered(fixed, lower_program.pack(fixed.program, blobs), blobs).errors()
        with pytest.raises(
            ExportError, match=r"dimension 'length' of input 'x' becomes fixed at 3 in the body of ingot\.gru"
        ):
            lower_program.pack(free.program, blobs)


class TestRefusals:
    @pytest.mark.matrix
    def test_code_is_loaded_only_where_that_is_allowed(self, many: Lowered) -> None:
        packed = archive(many)
        model = Repository(settings=Settings(device="cpu")).add(packed)
        with pytest.raises(Unsupported, match=r"format 'pt2' can run its author's code.* --allow-code"):
            model.load()
        model = Repository(settings=Settings(device="cpu", allow_code=True)).add(packed)
        model.load()
        assert (model.ready, model.platform) == (True, "torch_export")
        model.close()

    def test_the_servers_setting_is_off_unless_it_is_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not ServerConfig.of({}).runtime.allow_code
        assert ServerConfig.of({"allow_code": True}).runtime.allow_code
        monkeypatch.setenv("INGOT_ALLOW_CODE", "1")
        assert ServerConfig.of({}).runtime.allow_code

    @pytest.mark.parametrize("length", [0, 100, -100])
    def test_a_damaged_file_is_reported(self, tmp_path: Path, many: Lowered, length: int) -> None:
        path = tmp_path / "model"
        path.write_bytes(many.blobs.path(many.packed.graph).read_bytes()[:length])
        with pytest.raises(InvalidArgument, match="is not a PyTorch program, or is damaged"):
            load_engine(EngineSpec(path, format="pt2", allow_code=True))

    def test_a_program_of_another_maker_is_reported(self, tmp_path: Path, many: Lowered) -> None:
        path = tmp_path / "model.pt2"
        torch.export.save(many.case.program.exported, path)
        with pytest.raises(InvalidArgument, match="was not made by ingot export"):
            load_engine(EngineSpec(path, format="pt2", allow_code=True))

    def test_a_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="there is no model file"):
            load_engine(EngineSpec(tmp_path / "none", format="pt2", allow_code=True))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_missing_device_is_reported(self, many: Lowered) -> None:
        assert many.engine(device="auto").device == "cpu"
        with pytest.raises(Unsupported, match="PyTorch finds no"):
            many.engine(device="cuda")
        with pytest.raises(InvalidArgument, match="unknown device 'tpu'"):
            many.engine(device="tpu")

    def test_a_format_that_nothing_runs_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match="no engine of this version runs models of format 'tflite'"):
            load_engine(EngineSpec(tmp_path, format="tflite", allow_code=True))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


@pytest.mark.matrix
def test_a_device_that_a_plug_in_adds_to_pytorch() -> None:
    """In another process, since PyTorch has one such backend."""
    made = lowered(Weighted(), "x:float32[batch,3]")
    code = "import pathlib, sys, numpy as np; from ingot.runtime import EngineSpec, load_engine\n"
    code += f"sys.path.append({str(ROOT / 'tests' / 'runtime' / 'plugin')!r})\n"
    code += f"path = pathlib.Path({str(made.blobs.path(made.packed.graph))!r})\n"
    code += "engine = load_engine(EngineSpec(path, format='pt2', device='paper:0', allow_code=True))\n"
    code += "print(engine.device, engine.run({'x': np.array([[1, 2, 3]], np.float32)})['output'].tolist())\n"
    code += "import ingot_paper; print(ingot_paper.calls)"
    assert run_python(code) == "paper:0 [[2.0, 5.0, 10.0]]\n['mul', 'add']\n"
