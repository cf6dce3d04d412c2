"""AOTInductor packages: compiled, loaded and run. One package serves all tests but the long ones."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument, Unsupported
from ingot.export.lower import aoti
from ingot.model_store import BlobFolder, Store
from ingot.runtime import EngineSpec, Settings, load_engine
from ingot.serving import Repository
from tests.export.programs import Lowered, Returning, archive, capture, shared
from tests.support import RequireTool, run_python

pytestmark = pytest.mark.matrix


class Lookup(nn.Module):
    """Checks indices; the process must survive a failed check in a compiled model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 16), nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.embed(ids) + shift[:, None, None])
        return {"logits": self.out(hidden), "small": hidden.mean(1).bfloat16()}


@pytest.fixture(scope="module")
def lookup(require_tool: RequireTool) -> Lowered:
    require_tool("g++")
    case, blobs = capture(Lookup(), "ids:int64[batch,seq]", "shift:float32[batch]"), BlobFolder.scratch()
    return Lowered(case, aoti.pack(case.program, blobs), blobs)


def ask(samples: int = 2) -> dict[str, np.ndarray]:
    return {"ids": np.zeros((samples, 3), np.int64), "shift": np.ones(samples, np.float32)}


def test_it_answers_as_the_model_at_any_sizes(lookup: Lowered) -> None:
    assert set(lookup.errors()) == {"logits", "small"}


def test_it_runs_in_a_confined_process(lookup: Lowered) -> None:
    model = Repository(settings=Settings(device="cpu", allow_code=True)).add(archive(lookup))
    model.load()  # which replays the golden
    assert model.properties["isolation_reason"] == "its format aoti is its author's native code"
    model.close()


def test_the_package_declares_its_inputs_outputs_and_requirements(lookup: Lowered) -> None:
    engine = lookup.engine(device="auto")
    assert engine.signature == lookup.case.program.signature
    assert (engine.device, engine.platform) == ("cpu", "torch_aoti")
    requires = lookup.packed.requires
    assert (requires["engine"], requires["device"], requires["machine"]) == ("aotinductor", "cpu", platform.machine())
    assert requires["torch"] == torch.__version__.partition("+")[0]
    assert requires["instructions"]


def test_it_runs_without_the_models_source(lookup: Lowered) -> None:
    path = lookup.blobs.path(lookup.packed.graph)
    code = "import numpy as np, pathlib, sys; from ingot.runtime import EngineSpec, load_engine\n"
    code += f"engine = load_engine(EngineSpec(pathlib.Path({str(path)!r}), format='aoti', allow_code=True))\n"
    code += "answer = engine.run({'ids': np.zeros((2, 3), np.int64), 'shift': np.ones(2, np.float32)})\n"
    code += "print(answer['logits'].shape, 'tests' in sys.modules, 'ingot.export' in sys.modules)"
    assert run_python(code) == "(2, 3, 3) False False\n"


@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_out_of_range_is_the_callers_fault_and_ends_nothing(lookup: Lowered, threads: int) -> None:
    engine = lookup.engine(threads=threads)
    with pytest.raises(InvalidArgument, match="rejects this input: index out of bounds"):
        engine.run({**ask(64), "ids": np.full((64, 300), 10, np.int64)})
    assert engine.run(ask())["logits"].shape == (2, 3, 3)


def test_inputs_that_do_not_fit_never_reach_native_code(lookup: Lowered) -> None:
    engine = lookup.engine()
    for wrong in ({"ids": np.zeros((2, 3), np.int32)}, {"ids": np.zeros(2, np.int64)}, {"shift": np.ones(1, "f4")}):
        with pytest.raises(InvalidArgument, match=r"'ids'|'shift'"):
            engine.run({**ask(), **wrong})


@pytest.mark.long
def test_an_answer_may_be_written_into(lookup: Lowered) -> None:
    case, blobs = capture(Returning(), "x:float32[batch=1..64,3]"), BlobFolder.scratch()
    assert shared(Lowered(case, aoti.pack(case.program, blobs), blobs).engine()) == set()


def test_the_package_holds_no_sources(lookup: Lowered) -> None:
    with zipfile.ZipFile(lookup.blobs.path(lookup.packed.graph)) as package:
        suffixes = {Path(name).suffix for name in package.namelist()}
    assert ".so" in suffixes
    assert ".cpp" not in suffixes


def test_it_is_served_from_the_store_where_code_is_allowed(lookup: Lowered, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.push(archive(lookup), "lookup:1")
    model = Repository(store, Settings(device="cpu")).add("lookup:1")
    with pytest.raises(Unsupported, match=r"format 'aoti' can run its author's code.* \(INGOT_ALLOW_CODE=1"):
        model.load()
    model = Repository(store, Settings(device="cpu", instances=2, allow_code=True)).add("lookup:1")
    model.load()
    assert (model.ready, model.platform, model.device) == (True, "torch_aoti", "cpu")
    model.close()


class TestAnotherMachine:
    def test_another_pytorch_is_refused(self, lookup: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
        with pytest.raises(Unsupported, match=r"runs only with that; this is 2\.14\.1"):
            lookup.engine()

    def test_a_processor_with_fewer_instructions_is_refused(
        self, lookup: Lowered, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here = torch.cpu.get_capabilities()
        fewer = {name: False if isinstance(value, bool) else value for name, value in here.items()}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: fewer)
        with pytest.raises(Unsupported, match="this one lacks"):
            lookup.engine()

    def test_another_kind_of_processor_is_refused(self, lookup: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "sparc64")
        with pytest.raises(Unsupported, match="this one is sparc64"):
            lookup.engine()

    def test_another_device_is_refused(self, lookup: Lowered) -> None:
        with pytest.raises(Unsupported, match="compiled for 'cpu' and cannot run on 'cuda'"):
            lookup.engine(device="cuda")


class TestDamagedFiles:
    def test_a_file_that_is_not_a_package_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "model"
        path.write_bytes(b"no package")
        with pytest.raises(InvalidArgument, match="is not an AOTInductor package"):
            load_engine(EngineSpec(path, format="aoti", allow_code=True))
        with pytest.raises(InvalidArgument, match="there is no model file"):
            load_engine(EngineSpec(tmp_path / "none", format="aoti", allow_code=True))

    def test_a_package_of_another_maker_is_reported(self, lookup: Lowered, tmp_path: Path) -> None:
        path = tmp_path / "model"
        with zipfile.ZipFile(lookup.blobs.path(lookup.packed.graph)) as made, zipfile.ZipFile(path, "w") as other:
            for name in made.namelist():
                other.writestr(name, made.read(name).replace(b'"ingot"', b'"other"'))
        with pytest.raises(InvalidArgument, match="was not made by ingot export"):
            load_engine(EngineSpec(path, format="aoti", allow_code=True))
