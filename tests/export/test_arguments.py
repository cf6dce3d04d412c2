"""Nested, keyword and constant arguments: from the user's structure to flat names and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import ExportError, InvalidArgument
from ingot.export import export_model
from ingot.export.arguments import from_example, from_names
from ingot.model_store import Archive
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array


class Decoder(nn.Module):
    """A step of a decoder: a dict, a tuple of tuples, an option and an optional input."""

    def forward(
        self,
        batch: dict[str, torch.Tensor],
        past: tuple[tuple[torch.Tensor, torch.Tensor], ...] = (),
        *,
        doubled: bool = False,
        mask: torch.Tensor | None = None,
    ) -> Any:
        y = batch["tokens"] * (2 if doubled else 1)
        for keys, values in past:
            y = y + keys * values
        if mask is not None:
            y = y * mask
        return {"y": y, "past": tuple((keys + 1, values) for keys, values in past)}


X = torch.arange(6.0).reshape(3, 2)


def ask(archive: Archive, **inputs: Array) -> dict[str, Array]:
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    try:
        return engine.run(inputs)
    finally:
        engine.close()


@pytest.mark.matrix
def test_an_example_of_any_structure_is_flattened_to_dotted_names() -> None:
    example = {"batch": {"tokens": X}, "past": ((X, X), (X, X)), "doubled": True}
    archive = export_model(Decoder(), example)
    assert [spec.name for spec in archive.signature.inputs] == [
        "batch.tokens",
        "past.0.0",
        "past.0.1",
        "past.1.0",
        "past.1.1",
    ]
    assert [spec.name for spec in archive.signature.outputs] == [
        "y",
        "past.0.0_next",  # both an input and an output
        "past.0.1_next",
        "past.1.0_next",
        "past.1.1_next",
    ]
    assert "fixed in the graph: doubled=True" in archive.variant().serving.provenance.notes


def test_positional_arguments_have_the_names_of_their_parameters() -> None:
    arguments, tensors = from_example(Decoder(), ({"tokens": X}, ((X, X),)), {})
    assert arguments.names == ("batch.tokens", "past.0.0", "past.0.1")
    args, kwargs = arguments.bind(list(tensors.values()))
    assert torch.equal(args[0]["tokens"], X)
    assert isinstance(args[1][0], tuple)
    assert kwargs == {}


def test_names_alone_describe_the_structure() -> None:
    arguments = from_names(Decoder(), ["batch.tokens", "past.0.0", "past.0.1", "mask"], {"doubled": True})
    args, kwargs = arguments.bind([X, X + 1, X + 2, X + 3])
    assert torch.equal(args[0]["tokens"], X)
    assert torch.equal(args[1][0][1], X + 2)
    assert {*kwargs} == {"doubled", "mask"}
    assert torch.equal(kwargs["mask"], X + 3)
    assert kwargs["doubled"] is True


def test_a_model_described_by_names_answers_as_the_module_does() -> None:
    inputs = ["batch.tokens:float32[batch,2]", "mask:float32[batch,2]"]
    archive = export_model(Decoder(), inputs=inputs, constants={"doubled": True}, output_names=["y"])
    answer = ask(archive, **{"batch.tokens": X.numpy(), "mask": np.full((3, 2), 0.5, np.float32)})
    assert np.array_equal(answer["y"], X.numpy())


@pytest.mark.matrix
def test_an_optional_input_that_is_left_out_is_not_in_the_graph() -> None:
    archive = export_model(Decoder(), inputs="batch.tokens:float32[batch,2]", output_names=["y"])
    assert [spec.name for spec in archive.signature.inputs] == ["batch.tokens"]


@pytest.mark.matrix
def test_a_dataclass_in_the_output_is_split_into_its_fields() -> None:
    @dataclass
    class Both:
        left: torch.Tensor
        right: torch.Tensor

    torch.utils._pytree.register_dataclass(Both)

    class Splitter(nn.Module):
        def forward(self, x: torch.Tensor) -> Both:
            return Both(x + 1, x - 1)

    archive = export_model(Splitter(), X)
    assert [spec.name for spec in archive.signature.outputs] == ["left", "right"]


@pytest.mark.parametrize(
    ("names", "constants", "message"),
    [
        (["batch.tokens", "pest.0.0"], {}, "no parameter 'pest'; its parameters are batch, past, doubled, mask"),
        (["batch.tokens"], {"halved": True}, "no parameter 'halved'"),
        (["batch", "batch.tokens"], {}, "'batch.tokens' lies inside another input"),
        (["batch.tokens", "batch"], {}, "'batch' has other inputs inside it"),
    ],
)
def test_names_that_do_not_fit(names: list[str], constants: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        from_names(Decoder(), names, constants)


def test_objects_other_than_tensors_are_refused_in_the_output() -> None:
    class Cache:
        pass

    class Caching(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x + 1, Cache()

    with pytest.raises(ExportError, match="returns Cache as well as tensors"):
        export_model(Caching(), X)


class Loose(nn.Module):
    """Takes any keyword and reads one of them."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        y = x if scale is None else x * scale
        return y + kwargs["shift"] if "shift" in kwargs else y


@pytest.mark.matrix
def test_a_keyword_that_the_model_ignores_is_refused_and_one_that_it_reads_is_taken() -> None:
    with pytest.raises(InvalidArgument, match=r"ignores the input 'scael': .*its parameters are x, scale"):
        export_model(Loose(), inputs=["x:float32[batch,3]", "scael:float32[batch,3]"])
    archive = export_model(
        Loose(), inputs=["x:float32[batch,3]", "shift:float32[batch,3]"], constants={"use_cash": False}
    )
    assert [spec.name for spec in archive.signature.inputs] == ["x", "shift"]
    assert any("'use_cash' is not a parameter" in note for note in archive.variant().serving.provenance.notes)


@pytest.mark.matrix
def test_an_input_that_nothing_depends_on_is_noted() -> None:
    class Half(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * 2

    archive = export_model(Half(), inputs=["x:float32[batch,3]", "mask:bool[batch,3]"])
    assert "nothing depends on the input 'mask'" in archive.variant().serving.provenance.notes


def test_two_inputs_of_one_flat_name_are_refused() -> None:
    class Nested(nn.Module):
        def forward(self, x: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor = x["a.b"] + x["a"]["b"] * 10
            return result

    with pytest.raises(InvalidArgument, match=r"two of the example inputs are called 'x\.a\.b'"):
        export_model(Nested(), ({"a.b": torch.ones(2, 3), "a": {"b": torch.ones(2, 3)}},))
