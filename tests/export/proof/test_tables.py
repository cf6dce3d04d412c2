"""Sizes past the tables of a model, such as those of its positions.

The proof's own cases end at 33 of a dimension: those larger come from conditions and numbers in a graph, and a gather
has neither. So exports accepted sizes that the original refuses, and engines that read zeros or a slice answered there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.export.pipeline import evaluating
from ingot.export.source.subject import Subject, describe, prepare
from ingot.tensors import Range

IDS = "ids:int64[batch,seq]"


class Model(nn.Module):
    cache: torch.Tensor
    causal: torch.Tensor

    def __init__(self, positions: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(1000, 4), nn.Embedding(64, 4)
        self.positions = positions
        self.register_buffer("cache", torch.randn(64, 4))
        self.register_buffer("causal", torch.ones(64, 64).tril())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.words(ids).sum(1) + self.positions(self, ids)
        return total


def counted(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1])


def prepared(module: nn.Module, spec: str = IDS, example: torch.Tensor | None = None) -> Subject:
    with evaluating(module) as (own, snapshot):
        return prepare(own, describe(own, example, spec, None), snapshot=snapshot)


def relative(model: Model, ids: torch.Tensor) -> torch.Tensor:
    place = counted(ids)
    return model.cache[place[None] - place[:, None] + 31].sum((0, 1))


KINDS: dict[str, tuple[Callable[[Model, torch.Tensor], torch.Tensor], int | None]] = {
    "an embedding": (lambda model, ids: model.table(counted(ids)).mean(0), 64),
    "identifiers that are not padding": (lambda model, ids: model.table(ids.ne(1).cumsum(1) + 1).mean(1), 62),
    "positions from a mask": (lambda model, ids: model.table(ids.ne(0).cumsum(1)).mean(1), 63),
    "distances": (relative, 33),
    "an index": (lambda model, ids: model.cache[counted(ids)].mean(0), 64),
    "index_select": (lambda model, ids: model.cache.index_select(0, counted(ids)).mean(0), 64),
    "gather": (lambda model, ids: model.cache.gather(0, counted(ids)[:, None].expand(-1, 4)).mean(0), 64),
    "a slice": (lambda model, ids: (model.words(ids) * model.cache[: ids.shape[1]]).sum(1), 64),
    "a mask of pairs": (
        lambda model, ids: (model.causal[: ids.shape[1], : ids.shape[1]] @ model.words(ids)).sum(1),
        64,
    ),
    "every third": (lambda model, ids: model.table(torch.arange(ids.shape[1] // 3 + 1)).mean(0), 191),
    "clamped": (lambda model, ids: model.table(counted(ids).clamp(max=63)).mean(0), None),
    "a slice that ends": (lambda model, ids: model.cache[: ids.shape[1]].mean(0), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_end_where_a_table_does(kind: str) -> None:
    positions, last = KINDS[kind]
    subject = prepared(Model(positions))
    assert subject.examples.ranges == {"batch": Range(), "seq": Range(1, last)}
    assert all("has 64 rows, which are read by position at test_tables.py:" in note for note in subject.notes)
    assert len(subject.notes) == (last is not None)


def test_the_sizes_of_an_example_end_where_a_table_does() -> None:
    subject = prepared(Model(KINDS["an embedding"][0]), example=torch.randint(0, 1000, (2, 16)))
    assert subject.ranges == {"seq": Range(1, 64)}


def test_the_archive_accepts_the_sizes_of_a_table() -> None:
    archive = export_model(Model(KINDS["an embedding"][0]), inputs=IDS)
    assert archive.signature.ranges == {"seq": Range(1, 64)}
    (note,) = (note for note in archive.variant().serving.provenance.notes if "'table.weight'" in note)
    assert note.startswith("the model does not run at seq=65 (IndexError")
    assert note.endswith("; the archive accepts seq=1..64")


def too_long(model: Model, ids: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > 100:
        raise ValueError("at most 100 words")
    return torch.zeros(4)


@pytest.mark.parametrize(
    ("positions", "remedy"), [(KINDS["an embedding"][0], "1..64"), (too_long, "1..100")], ids=["table", "code"]
)
def test_a_declared_end_that_the_model_rejects_is_refused(
    positions: Callable[[Model, torch.Tensor], torch.Tensor], remedy: str
) -> None:
    with pytest.raises(ExportError, match=rf"does not run at seq=.*; declare seq={remedy}$"):
        prepared(Model(positions), "ids:int64[batch,seq=1..512]")
    assert prepared(Model(positions), f"ids:int64[batch,seq={remedy}]").notes == ()
