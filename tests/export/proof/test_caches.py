"""Buffers that a model fills when it is first called: constants where they depend on sizes alone, otherwise refused."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.runtime import EngineSpec, load_engine
from tests.support import RunIngot, refused, succeeded


class Positions(nn.Module):
    """Attention by relative positions, as ConViT has it: they are computed when the count of patches changes."""

    def __init__(self, empty: bool = False) -> None:
        super().__init__()
        self.positions: torch.Tensor | None
        self.register_buffer("positions", None if empty else torch.zeros(1, 1, 1, 2), persistent=False)
        self.qk, self.where = nn.Linear(4, 8), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = x.flatten(2).transpose(1, 2)
        count = patches.shape[1]
        if self.positions is None or self.positions.shape[1] != count:
            self.positions = self.relative(count)
        query, key = self.qk(patches).chunk(2, -1)
        scores = (query @ key.transpose(1, 2)).softmax(-1) + self.where(self.positions).squeeze(-1).softmax(-1)
        result: torch.Tensor = scores @ patches
        return result

    def relative(self, count: int) -> torch.Tensor:
        side = math.isqrt(count)
        along = (torch.arange(side)[None] - torch.arange(side)[:, None]).float()
        across = along.repeat_interleave(side, 0).repeat_interleave(side, 1)
        return torch.stack([along.repeat(side, side), across], -1)[None]


class Table(nn.Module):
    """Rotary angles: a table that is computed for the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.table.shape[0]:
            self.table = torch.arange(length).float()[:, None] * torch.tensor([0.1, 0.2, 0.3, 0.4])
        return x * torch.cos(self.table[:length])


class Grid(nn.Module):
    """YOLOv5's head: a list with the grid of each level, which is made again where the size of the level changes."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = [torch.zeros(1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape[2:]
        if self.grid[0].shape[2:4] != x.shape[2:4]:
            ys, xs = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            self.grid[0] = torch.stack((xs, ys), 2).view(1, 1, rows, columns, 2).float()
        result: torch.Tensor = (x.sigmoid()[:, None, :, :, :, None] + self.grid[0][:, :, None]).flatten(2)
        return result


class Angles(nn.Module):
    """Rotary angles for the last length, in an attribute that the first call adds."""

    angles: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "angles") or len(self.angles) != x.shape[1]:
            self.angles = torch.arange(x.shape[1])[:, None] * torch.tensor([0.1, 0.2, 0.3, 0.4])
        return x * self.angles.cos()


class Once(nn.Module):
    """A table that is computed only at the first call: the model itself is wrong, so no graph can be right."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor | None
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = torch.full((4,), float(x.shape[1]))
        return x / self.mean


class Calibrated(nn.Module):
    """A scale that the first batch sets, as ActNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: torch.Tensor
        self.known: torch.Tensor
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("known", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.known:
            self.scale, self.known = 1 / x.std((0, 1)), torch.tensor(True)
        return x * self.scale


@pytest.mark.matrix
@pytest.mark.parametrize("empty", [False, True])
def test_a_buffer_filled_by_the_first_call_is_a_constant(empty: bool) -> None:
    module = Positions(empty).eval()
    before = module.positions
    archive = export_model(module, inputs="x:float32[batch,4,6,6]")
    assert "the model fills positions on its first call; the graph contains the result" in (
        archive.variant().serving.provenance.notes
    )
    assert module.positions is before
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    for rows in (1, 5):
        x = torch.randn(rows, 4, 6, 6)
        torch.testing.assert_close(torch.from_numpy(engine.run({"x": x.numpy()})["output"]), module(x))
    engine.close()


@pytest.mark.parametrize(
    ("module", "inputs", "dims", "shape"),
    [
        (Positions, "x:float32[batch,4,6,w=6..24:6]", "'w'", (4, 6, 6)),
        (Once, "x:float32[batch,seq,4]", "'seq'", (5, 4)),
    ],
)
@pytest.mark.matrix
def test_one_that_depends_on_a_dynamic_size_is_refused_with_the_remedy(
    module: type[nn.Module], inputs: str, dims: str, shape: tuple[int, ...]
) -> None:
    kept = module().eval()
    with pytest.raises(ExportError) as caught:
        export_model(kept, inputs=inputs)
    assert f"computed for one size of {dims}: declare {dims} as fixed" in str(caught.value)
    archive = export_model(kept, inputs=f"x:float32[batch,{','.join(map(str, shape))}]")
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    x = torch.randn(2, *shape)
    torch.testing.assert_close(torch.from_numpy(engine.run({"x": x.numpy()})["output"]), kept(x))
    engine.close()


@pytest.mark.parametrize(
    ("module", "inputs", "shapes"),
    [
        (Grid, "x:float32[batch,3,h,w]", [(3, 5, 7), (3, 7, 5), (3, 40, 1)]),
        pytest.param(Table, "x:float32[batch,seq,4]", [(50, 4), (1, 4)], marks=pytest.mark.matrix),
        pytest.param(Angles, "x:float32[batch,seq,4]", [(50, 4), (1, 4)], marks=pytest.mark.matrix),
    ],
)
def test_one_that_the_code_computes_again_for_each_size_is_part_of_the_graph(
    module: type[nn.Module], inputs: str, shapes: list[tuple[int, ...]]
) -> None:
    kept = module().eval()
    archive = export_model(kept, inputs=inputs)
    notes = archive.variant().serving.provenance.notes
    assert any(note.endswith("on its first call; the graph computes the values at each call") for note in notes)
    with contextlib.closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
        for shape in shapes:
            x = torch.randn(2, *shape)
            torch.testing.assert_close(torch.from_numpy(engine.run({"x": x.numpy()})["output"]), kept(x))


@pytest.mark.matrix
def test_a_buffer_set_by_the_first_values_is_refused_with_a_remedy_that_works() -> None:
    module = Calibrated().eval()
    with pytest.raises(ExportError, match=r"sets scale from the inputs of its first call.*call the module once"):
        export_model(module, inputs="x:float32[batch,seq,4]")
    module(torch.randn(3, 5, 4))
    assert export_model(module, inputs="x:float32[batch,5,4]")


@pytest.mark.matrix
def test_the_command_line_reports_it(run_ingot: RunIngot, tmp_path: Path) -> None:
    source = "tests.export.proof.test_caches:Positions"
    result = run_ingot("export", source, "--input", "x:float32[batch,4,6,6]", "-o", tmp_path / "p.ingot")
    succeeded(result)
    assert "note: the model fills positions on its first call" in result.stderr
    result = run_ingot("export", source, "--input", "x:float32[batch,4,side=6..24:6,6]", "-o", tmp_path / "q.ingot")
    note, message = result.stderr.splitlines()
    assert (result.returncode, note[:26]) == (1, "note: without --checkpoint")
    assert "declare 'side' as fixed" in message


class Kinds(nn.Module):
    """Columns that are numbers or categories, which a tensor says: a buffer, or a plain attribute as in TabNet."""

    def __init__(self, registered: bool):
        super().__init__()
        kinds = torch.tensor([True, False, True])
        if registered:
            self.register_buffer("kinds", kinds)
        else:
            self.kinds = kinds
        self.embedding = nn.Embedding(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = []
        for column, number in enumerate(self.kinds):
            if number:
                columns.append(x[:, column : column + 1])
            else:
                columns.append(self.embedding(x[:, column].long().clamp(0, 4)))
        return torch.cat(columns, 1)


@pytest.mark.matrix
@pytest.mark.parametrize("registered", [True, False])
def test_a_branch_on_a_tensor_that_never_changes_is_a_constant(registered: bool) -> None:
    module = Kinds(registered).eval()
    archive = export_model(module, inputs="x:float32[batch,3]")
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    for rows in (1, 6):
        x = 4 * torch.rand(rows, 3)
        torch.testing.assert_close(torch.from_numpy(engine.run({"x": x.numpy()})["output"]), module(x))
    engine.close()


class Recalls(nn.Module):
    """A TorchScript model that sums its inputs over calls, as silero's detector of speech does."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.state + x.sum(0)
        return x + self.state


def test_a_torchscript_file_with_hidden_state_is_refused(run_ingot: RunIngot, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; people's files are still there
        torch.jit.save(torch.jit.script(Recalls().eval()), tmp_path / "recalls.pt")
    message = refused(run_ingot("export", tmp_path / "recalls.pt", "--input", "x:float32[batch,4]", "-o", "x.ingot"))
    assert "the TorchScript keeps a state between calls" in message
    assert "with the state as an input and an output of forward" in message
    assert "randomness" not in message
