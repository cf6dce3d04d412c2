"""An archive's claims about padding are proved when it is exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ingot.cli.main import application
from ingot.errors import InvalidArgument, ParityError
from ingot.export import export_model
from ingot.model_store import Archive
from ingot.tensors import Padding

INPUTS = ["ids:int64[batch,seq=1..64]", "mask:int64[batch,seq=1..64]"]


FLOATS = ["x:float32[batch,seq=1..512]", "mask:int64[batch,seq=1..512]"]


class Pair(nn.Module):
    """Any function of values and their mask."""

    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.function(x, mask)


class Mean(nn.Module):
    """The masked mean of embeddings, and each embedding; ``masked`` says whether the mask is applied."""

    def __init__(self, masked: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 4)
        self.masked = masked

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.table(ids)
        weights = mask.unsqueeze(-1).to(rows.dtype) if self.masked else torch.ones_like(rows)
        return (rows * weights).sum(1) / weights.sum(1).clamp(min=1), rows


def inspected(archive: Archive, folder: Path) -> list[str]:
    """Return the lines about padding that ``ingot inspect`` prints."""
    archive.save(folder / "m.ingot")
    result = CliRunner().invoke(application("inspect"), ["inspect", str(folder / "m.ingot")])
    return [line for line in result.stdout.splitlines() if line.startswith("padding ")]


def test_a_masked_model_may_be_padded_and_the_archive_says_how(tmp_path: Path) -> None:
    archive = export_model(Mean(), inputs=INPUTS, pad="seq")
    serving = archive.variant().serving
    assert serving.padding == {"seq": Padding({"ids": 0, "mask": 0})}
    assert any(note.startswith("padding along 'seq' changes no output in") for note in serving.provenance.notes)
    assert serving.evidence.tried_paddings == ("seq",)
    shown = "padding  seq:ids=0,mask=0; shown by examples; its graph does not prove it for all values"
    assert inspected(archive, tmp_path) == [shown]


@pytest.mark.matrix
def test_values_and_buckets_are_kept(tmp_path: Path) -> None:
    archive = export_model(Mean(), inputs=INPUTS, pad=["seq:ids=7@16,64"])
    serving = archive.variant().serving
    assert inspected(archive, tmp_path)[0].startswith("padding  seq:ids=7,mask=0@16,64; ")
    assert serving.padding == {"seq": Padding({"ids": 7, "mask": 0}, (16, 64))}


@pytest.mark.matrix
def test_a_model_that_notices_padding_is_refused() -> None:
    with pytest.raises(ParityError, match=r"padding along 'seq' from \d+ to \d+ changes .*: 'output_0' differs"):
        export_model(Mean(masked=False), inputs=INPUTS, pad="seq")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: (x * mask).sum(1) / (x.shape[1] // 256 + 1),
        lambda x, mask: (x * mask).amax(1),
    ],
    ids=["a size beyond the examples", "a largest value below that of the padding"],
)
def test_padding_that_only_some_sizes_or_values_show_is_refused(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(ParityError, match="changes the model's outputs"):
        export_model(Pair(function), inputs=FLOATS, pad="seq")


@pytest.mark.matrix
def test_rows_that_a_mask_hides_whole_are_not_padded(tmp_path: Path) -> None:
    def pooled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * (x + (1 - mask) * -1e9).softmax(1)).sum(1)

    archive = export_model(Pair(pooled), inputs=FLOATS, pad="seq")
    serving = archive.variant().serving
    assert "; not of rows that mask hides whole; " in inspected(archive, tmp_path)[0]
    assert serving.padding["seq"].masks == ("mask",)
    assert any("except for rows that mask hides whole" in note for note in serving.provenance.notes)


@pytest.mark.matrix
def test_the_graph_proves_padding_where_positions_never_meet(tmp_path: Path) -> None:
    archive = export_model(Pair(lambda x, mask: x.exp() * mask), inputs=FLOATS, pad="seq")
    serving = archive.variant().serving
    assert inspected(archive, tmp_path) == ["padding  seq:x=0,mask=0"]
    note = "padding along 'seq' changes no output: its positions never influence each other"
    assert note in serving.provenance.notes


@pytest.mark.matrix
def test_a_value_that_unmasks_is_refused() -> None:
    with pytest.raises(ParityError, match="changes the model's outputs"):
        export_model(Mean(), inputs=INPUTS, pad="seq:mask=1")


@pytest.mark.matrix
def test_an_output_that_cannot_be_cut_back_is_refused() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x], 1)

    with pytest.raises(ParityError, match="no named dimension of it shows how to cut it back"):
        export_model(Twice(), inputs=["x:float32[batch,seq]"], pad="seq")


@pytest.mark.matrix
def test_a_dimension_of_one_size_cannot_be_proved() -> None:
    with pytest.raises(ParityError, match="no example could be enlarged"):
        export_model(Mean(), inputs=[text.replace("1..64", "8..8") for text in INPUTS], pad="seq")


@pytest.mark.parametrize(
    ("pad", "says"),
    [
        ("batch", "'batch' cannot be padded: it is the batch; there are: seq"),
        ("width", "'width' cannot be padded: it is not a dimension of the inputs"),
        ("seq:ids=0.5", "0.5 cannot pad input 'ids'"),
        ("seq:msk=1", "padding of 'seq' has a value for 'msk', which is not an input; these have it: ids, mask"),
        ("seq@70", "bucket 70 of 'seq' is not one of its sizes"),
        ("seq@32,16", "not in ascending order"),
    ],
)
@pytest.mark.matrix
def test_paddings_that_do_not_fit_the_inputs_are_refused(pad: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        export_model(Mean(), inputs=INPUTS, pad=pad)


@pytest.mark.parametrize(
    "pad", ["", "seq:", "seq:ids", "seq:ids=", "seq:ids=x", "seq:ids=nan", "seq@", "seq@1,,2", "2"]
)
def test_text_without_a_padding_is_refused(pad: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a padding"):
        export_model(Mean(), inputs=INPUTS, pad=pad)
