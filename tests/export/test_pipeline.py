"""Exports from end to end; outputs of the archive's graph in ONNX Runtime are compared with PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.errors import ExportError, InvalidArgument, ParityError
from ingot.export import export_model, load_source
from ingot.export.lower import onnx as lower_onnx
from ingot.model_store import Archive
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array, DType, Range
from tests.export import models
from tests.export.source.test_imported import torchscript


class Bounds(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


ROWS = ["x:float32[batch,4]"]


def ask(archive: Archive, **inputs: Array) -> dict[str, Array]:
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    try:
        return engine.run(inputs)
    finally:
        engine.close()


def torch_answer(module: nn.Module, *inputs: Array) -> Array:
    with torch.no_grad():
        return np.asarray(module.eval()(*map(torch.tensor, inputs)))


def shapes(archive: Archive) -> list[str]:
    return [str(spec) for spec in (*archive.signature.inputs, *archive.signature.outputs)]


@pytest.fixture(scope="module")
def net() -> Archive:
    return export_model(models.net, inputs=ROWS, source="tests:net")


class TestOneModel:
    @pytest.mark.matrix
    @pytest.mark.parametrize("rows", [1, 2, 70])
    def test_it_answers_as_pytorch_does_at_any_batch_size(self, net: Archive, rows: int) -> None:
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        assert np.allclose(ask(net, x=x)["output"], torch_answer(models.net, x), atol=1e-5)

    @pytest.mark.matrix
    def test_its_documents_say_what_it_is(self, net: Archive) -> None:
        serving = net.variant().serving
        assert (net.name, serving.variant, serving.precision, serving.format) == ("net", "fp32", "fp32", "onnx")
        assert shapes(net) == ["x:float32[batch,4]", "output:float32[batch,3]"]
        assert net.signature.batch == "batch"
        assert serving.provenance.source == "tests:net"
        assert {"ingot", "torch"} <= set(serving.provenance.versions)
        assert serving.requires["engine"] == "onnxruntime"

    def test_its_proof_is_in_it(self, net: Archive) -> None:
        (parity,) = net.variant().serving.evidence.parity
        assert parity.tensor == "output"
        assert parity.cases >= 4
        assert 0 <= parity.error <= parity.tolerance
        assert [item.rows for item in net.variant().serving.evidence.latency] == [1, 8, 32]
        for golden in net.variant().goldens():
            assert np.allclose(golden.outputs["output"], torch_answer(models.net, golden.inputs["x"]), atol=1e-5)

    def test_it_leaves_the_users_module_as_it_was(self) -> None:
        module = models.Net().train()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        export_model(module, inputs=ROWS)
        assert all(part.training for part in module.modules())
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())

    @pytest.mark.matrix
    def test_the_steps_are_reported(self) -> None:
        steps: list[str] = []
        export_model(models.net, inputs=ROWS, progress=steps.append)
        assert len(steps) >= 4
        assert len(set(steps)) == len(steps)

    @pytest.mark.matrix
    def test_names_are_given_or_derived(self) -> None:
        named = export_model(models.net, inputs=ROWS, name="team/net", output_names=["logits"])
        assert named.name == "team/net"
        assert list(ask(named, x=np.zeros((1, 4), np.float32))) == ["logits"]


class TestShapes:
    @pytest.mark.matrix
    def test_two_inputs_go_by_name_in_any_order(self) -> None:
        left, right = np.ones((2, 3), np.float32), np.full((2, 5), 2, np.float32)
        for inputs in (
            ["left:float32[batch,3]", "right:float32[batch,seq]"],
            ["right:float32[batch,seq]", "left:float32[batch,3]"],
        ):
            archive = export_model(models.Pair(), inputs=inputs)
            assert [str(spec) for spec in archive.signature.inputs] == inputs
            assert ask(archive, left=left, right=right)["output"].tolist() == [-17, -17]

    @pytest.mark.matrix
    def test_names_that_forward_does_not_have_go_by_position(self) -> None:
        archive = export_model(models.Pair(), inputs=["a:float32[batch,3]", "b:float32[batch,2]"])
        answer = ask(archive, a=np.ones((1, 3), np.float32), b=np.ones((1, 2), np.float32))
        assert answer["output"].tolist() == [-1]

    @pytest.mark.matrix
    def test_an_input_that_is_not_used_stays(self) -> None:
        class Unused(nn.Module):
            def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return a * 2

        archive = export_model(Unused(), inputs=["a:float32[batch,3]", "b:float32[batch,seq]"])
        assert [spec.name for spec in archive.signature.inputs] == ["a", "b"]
        assert ask(archive, a=np.ones((1, 3), np.float32), b=np.ones((1, 9), np.float32))["output"].tolist() == [
            [2] * 3
        ]

    @pytest.mark.matrix
    def test_further_dynamic_dimensions_with_a_range(self) -> None:
        module = nn.Embedding(2, 6)  # only 0 and 1 are valid: generated integers must be such indices
        archive = export_model(module, inputs=["input:int64[batch,seq=2..512]"])
        assert archive.signature.ranges == {"seq": Range(2, 512)}
        assert shapes(archive) == ["input:int64[batch,seq]=0..1", "output:float32[batch,seq,6]"]
        ids = np.array([[0, 1, 1, 0, 1]])
        assert np.array_equal(ask(archive, input=ids)["output"], torch_answer(module, ids))

    @pytest.mark.matrix
    def test_a_dimension_computed_from_another(self) -> None:
        archive = export_model(models.Function(lambda x: torch.cat([x, x], 1)), inputs=["x:float32[batch,seq]"])
        assert shapes(archive)[1] == "output:float32[batch,2*seq]"

    @pytest.mark.matrix
    def test_given_examples_alone_describe_the_model(self) -> None:
        module = nn.Bilinear(3, 2, 4)
        first, second = torch.randn(5, 3), torch.randn(5, 2)
        archive = export_model(module, [first, second])
        assert shapes(archive)[:2] == ["input1:float32[batch,3]", "input2:float32[batch,2]"]
        one = {"input1": first[:1].numpy(), "input2": second[:1].numpy()}
        assert np.allclose(ask(archive, **one)["output"], torch_answer(module, *one.values()), atol=1e-5)
        for form in (first, first.numpy(), [first], {"input": first}):
            assert shapes(export_model(nn.Linear(3, 2), form))[0] == "input:float32[batch,3]"

    @pytest.mark.matrix
    def test_given_examples_fill_a_description(self) -> None:
        """Where generated values would not do: indices that must be from 5 to 9."""

        class Picky(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(5, 2)

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return self.table(ids - 5)  # type: ignore[no-any-return]

        with pytest.raises(ExportError, match="does not run on the example inputs"):
            export_model(Picky(), inputs=["ids:int64[batch,seq]"])
        archive = export_model(Picky(), {"ids": np.array([[5, 6, 9], [8, 7, 5]])}, inputs=["ids:int64[batch,seq]"])
        assert ask(archive, ids=np.array([[9, 5]]))["output"].shape == (1, 2, 2)

    @pytest.mark.matrix
    def test_without_a_batch_requests_are_served_one_by_one(self) -> None:
        archive = export_model(nn.Linear(4, 3), inputs=["input:float32[4]"])
        assert archive.signature.batch is None
        assert "served without batching: no input has a dimension named 'batch'" in notes(archive)
        assert [item.rows for item in archive.variant().serving.evidence.latency] == [1]

    @pytest.mark.matrix
    def test_another_dimension_can_be_the_batch(self) -> None:
        archive = export_model(nn.Linear(4, 3), inputs=["input:float32[N,4]"], batch_dim="N")
        assert archive.signature.batch == "N"
        with pytest.raises(InvalidArgument, match="no input has a dimension 'M'; the dynamic ones are: N"):
            export_model(nn.Linear(4, 3), inputs=["input:float32[N,4]"], batch_dim="M")

    def test_rows_that_touch_are_never_joined(self) -> None:
        archive = export_model(models.Function(lambda x: x - x.mean(0)), inputs=ROWS)
        assert archive.signature.batch is None
        assert "depends on the other samples" in notes(archive)


class TestOutputs:
    @pytest.mark.parametrize(
        ("function", "names"),
        [
            (lambda x: (x, [x + 1, x * 2]), ["output_0", "output_1_0", "output_1_1"]),
            (lambda x: {"logits": x * 2, "hidden": {"first": x + 1}}, ["logits", "hidden.first"]),
            (lambda x: Bounds(x - 1, x + 1), ["low", "high"]),
            (lambda x: (x * 2, None, x + 1), ["output_0", "output_2"]),
            (lambda x: [x * 2] * 2, ["output_0", "output_1"]),
            (lambda x: {"same": x}, ["same"]),
        ],
        ids=["nested", "dict", "namedtuple", "none", "twice", "input-itself"],
    )
    @pytest.mark.one_case
    def test_every_tensor_has_a_name_and_its_own_values(self, function: Any, names: list[str]) -> None:
        archive = export_model(models.Function(function), inputs=ROWS)
        assert [spec.name for spec in archive.signature.outputs] == names
        x = torch.arange(8, dtype=torch.float32).reshape(2, 4)
        expected = [leaf for leaf in torch.utils._pytree.tree_leaves(function(x)) if leaf is not None]
        answers = ask(archive, x=x.numpy())
        for name, tensor in zip(names, expected, strict=True):
            assert np.array_equal(answers[name], tensor.numpy())

    @pytest.mark.parametrize(
        ("function", "options", "message"),
        [
            (lambda x: 3, {}, "the model returns int, which holds no tensor"),
            (lambda x: None, {}, "holds no tensor"),
            (lambda x: (x * 2, 3), {}, "returns 3 as well as tensors"),
            (lambda x: x * 2, {"output_names": ["x"]}, "'x' names an input and an output"),
            (lambda x: (x, x * 2), {"output_names": ["a"]}, "has 2 outputs, but 1 names were given: a"),
            (lambda x: (x, x * 2), {"output_names": ["a", "a"]}, "have one name .*'a', 'a'"),
            (lambda x: (x, x * 2), {"output_names": ["a", ""]}, "an output of the model has the empty name"),
            (lambda x: {"": x * 2}, {}, "the empty name .*rename them .* or name all outputs with --output-name"),
            (lambda x: {"a.b": x, "a": {"b": x * 2}}, {}, "two outputs .* one name .*'a.b', 'a.b'.*--output-name"),
            (lambda x: {"x": x * 2, "x_next": x * 3}, {}, "two outputs .* one name .*'x_next', 'x_next'"),
            (lambda x: torch.complex(x, x), {}, "arrays of type complex64 cannot be tensors"),
        ],
    )
    def test_outputs_that_cannot_be_served(self, function: Any, options: Mapping[str, Any], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            export_model(models.Function(function), inputs=ROWS, **options)

    @pytest.mark.matrix
    def test_outputs_of_one_name_can_be_named(self) -> None:
        function = models.Function(lambda x: {"a.b": x * 3, "a": {"b": x * 2, "": x}})
        archive = export_model(function, inputs=ROWS, output_names=["a", "b", "c"])
        assert [spec.name for spec in archive.signature.outputs] == ["a", "b", "c"]


class TestTypes:
    @pytest.mark.parametrize("dtype", [DType.FP16, DType.FP64])
    @pytest.mark.matrix
    def test_floating_point_types(self, dtype: DType) -> None:
        module = nn.Linear(4, 3).to(getattr(torch, dtype.torch_name))
        archive = export_model(module, inputs=[f"input:{dtype.torch_name}[batch,4]"])
        assert archive.variant().name == dtype.value.lower()
        x = np.ones((2, 4), dtype.numpy)
        assert np.allclose(ask(archive, input=x)["output"], torch_answer(module, x), rtol=1e-2)

    def test_a_model_without_weights_is_called_by_the_type_of_its_inputs(self) -> None:
        """Though its graph computes with a size in double precision."""
        module = models.Function(lambda x: x * math.sqrt(x.shape[1] + 0.5))
        assert export_model(module, inputs=["x:float32[batch,n]"]).variant().name == "fp32"

    @pytest.mark.matrix
    def test_bfloat16_where_the_runtime_has_the_operators(self) -> None:
        archive = export_model(models.Function(lambda x: x), inputs=["x:bfloat16[batch,2]"])
        x = np.array([[1.5, -2]]).astype(DType.BF16.numpy)
        assert np.array_equal(ask(archive, x=x)["output"], x)

    @pytest.mark.parametrize(
        ("dtype", "function"),
        [
            (DType.INT64, lambda x: x * 3 - 1),
            (DType.INT32, lambda x: x.sum(1)),
            (DType.UINT8, lambda x: x.float() / 255),
            (DType.INT8, lambda x: -x),
            (DType.BOOL, lambda x: ~x),
        ],
    )
    @pytest.mark.one_case
    def test_integers_and_booleans(self, dtype: DType, function: Any) -> None:
        archive = export_model(models.Function(function), inputs=[f"x:{dtype.torch_name}[batch,4]"])
        x = np.array([[0, 1, 1, 0]]).astype(dtype.numpy)
        assert np.array_equal(ask(archive, x=x)["output"], function(torch.from_numpy(x)).numpy())

    def test_text_is_refused_with_the_reason(self) -> None:
        with pytest.raises(ExportError, match="PyTorch has no text tensors; tokenize before"):
            export_model(models.net, inputs=["x:string[batch,4]"])


class TestRefusals:
    def test_inputs_without_a_description_are_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="the model's inputs are not described; pass inputs"):
            export_model(models.net)

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (["x:float32[batch,4]", "x:float32[batch,4]"], "input 'x' is described twice"),
            (
                ["a:float32[batch=1..4]", "b:float32[batch=1..8]"],
                r"dimension 'batch' has two ranges: 1\.\.4 and 1\.\.8",
            ),
            (["x:float32"], "is not a tensor description"),
            (["x:float32[batch,5]"], r"does not run on the example inputs \(x \[3, 5\]\): RuntimeError: mat1 and mat2"),
            (["x:int64[batch,4]"], r"does not run on the example inputs \(x \[3, 4\]\): RuntimeError: mat1 and mat2"),
            (["x:float32[batch,4]", "y:float32[batch]"], "the model has no parameter 'y'; its parameters are x"),
        ],
    )
    def test_inputs_that_do_not_fit_the_model(self, inputs: list[str], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message) as caught:
            export_model(models.Net(), inputs=inputs)
        assert "\n" not in str(caught.value)

    def test_an_error_in_the_code_of_the_model_names_its_line_alone(self) -> None:
        with pytest.raises(ExportError, match=r"TypeError: .*'str' .*\(at .*test_pipeline\.py:\d+ in <lambda>\)$"):
            export_model(models.Function(lambda x: x @ "weights"), inputs=["x:float32[batch,4]"])

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([torch.ones(1, 4)] * 2, "2 example inputs were given, but the model's parameters are x"),
            ({"x": torch.ones(1, 4), "y": torch.ones(1)}, "the model has no parameter 'y'"),
            ({}, "the example inputs hold no tensor"),
            ([[[1.0, 2.0, 3.0, 4.0]]], "not numbers or lists of them"),
            (torch.ones(1, 5), "dimension 1 of input 'x' is 5, the model takes 4"),
        ],
    )
    def test_examples_that_do_not_fit_the_description(self, given: Any, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            export_model(models.net, given, inputs=ROWS)

    @pytest.mark.parametrize("shown", [True, False])
    def test_state_that_changes_is_not_dropped_in_silence(self, shown: bool) -> None:
        with pytest.raises(ExportError, match="the model changes calls while it runs"):
            export_model(models.Counter(shown), inputs=["x:int64[batch,2]"])

    def test_an_input_that_is_overwritten_is_not_dropped_in_silence(self) -> None:
        with pytest.raises(ExportError, match="the model changes x while it runs"):
            export_model(models.Function(lambda x: x.add_(1)), inputs=ROWS)

    @pytest.mark.matrix
    def test_a_branch_on_values_names_the_line(self, capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ExportError, match=r"use torch\.where .*models\.py:\d+ in forward"):
            export_model(models.Branch(), inputs=ROWS)
        assert capfd.readouterr() == ("", "")  # the error says it all; torch's own printing is for its developers

    def test_a_dimension_that_the_code_fixes(self) -> None:
        with pytest.raises(ExportError, match=r"runs at batch=3 only, .*declare 'batch' as a number"):
            export_model(models.Function(lambda x: x.reshape(3, 4)), inputs=ROWS)

    @pytest.mark.matrix
    def test_a_range_that_the_code_needs(self) -> None:
        module = models.Function(lambda x: x[:, : x.shape[1] // 2] if x.shape[1] <= 8 else x[:, :2])
        with pytest.raises(ExportError, match=r"declare .*seq=\d*\.\.\d*"):
            export_model(module, inputs=["x:float32[batch,seq]"])

    def test_a_model_with_randomness(self) -> None:
        with pytest.raises(ParityError, match="returns different 'output' for the same input each time"):
            export_model(models.Function(lambda x: x + torch.rand_like(x)), inputs=ROWS)

    @pytest.mark.matrix
    def test_an_opset_that_there_is_not(self) -> None:
        with pytest.raises(ExportError, match="cannot be expressed in opset 99"):
            export_model(models.net, inputs=ROWS, opset=99)

    def test_a_name_that_registries_refuse(self) -> None:
        with pytest.raises(InvalidArgument, match="'My Net' cannot name a model"):
            export_model(models.net, inputs=ROWS, name="My Net")

    def test_a_miscompiled_graph_is_never_packed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The exporter is made to get one weight wrong, as real ones have."""
        lower = lower_onnx.lower

        def miscompile(*arguments: Any, **options: Any) -> ir.Model:
            model: ir.Model = lower(*arguments, **options)
            value = next(item for item in model.graph.initializers.values() if len(item.shape or ()) == 2)
            assert value.const_value is not None
            wrong = value.const_value.numpy().copy()
            wrong[0, 0] += 0.1
            value.const_value = ir.Tensor(wrong, name=value.name)
            return model

        monkeypatch.setattr(lower_onnx, "lower", miscompile)
        torch.manual_seed(0)  # a ReLU could hide the weight from all inputs
        with pytest.raises(
            ParityError,
            match=r"does not equal the PyTorch model: output 'output' differs by .*tolerance.*; --bisect names",
        ):
            export_model(models.net, inputs=ROWS)


@pytest.mark.matrix
def test_inputs_may_have_no_dimensions() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, count: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return x * 2.5 + count * chosen

    archive = export_model(Scaled(), inputs=["x:float32[]", "count:int64[]", "chosen:bool[]"])
    answer = ask(archive, x=np.asarray(2, np.float32), count=np.asarray(3), chosen=np.asarray(True))
    assert answer["output"].tolist() == 8


@pytest.mark.matrix
def test_large_weights_are_stored_next_to_the_graph() -> None:
    module = nn.Linear(600, 600)
    archive = export_model(module, inputs=["input:float32[batch,600]"])
    variant = archive.variant()
    (weight,) = variant.weights
    assert weight.size == 600 * 600 * 4
    assert variant.graph.size < 100_000
    again = export_model(nn.Sequential(module, nn.ReLU()), inputs=["input:float32[batch,600]"])
    assert again.variant().weights == variant.weights  # a store holds it once


@pytest.mark.matrix
def test_a_torchscript_file_is_exported_by_the_names_of_its_inputs(tmp_path: Path) -> None:
    module = load_source(str(torchscript(models.Net(), tmp_path / "net.pt")))
    assert isinstance(module, nn.Module)
    archive = export_model(module, inputs=ROWS, name="net")
    x = np.ones((3, 4), np.float32)
    assert np.allclose(ask(archive, x=x)["output"], torch_answer(module, x), atol=1e-5)


@pytest.mark.matrix
def test_a_torchscript_model_accepts_inputs_in_any_order(tmp_path: Path) -> None:
    module = load_source(str(torchscript(models.Pair(), tmp_path / "pair.pt")))
    assert isinstance(module, nn.Module)
    archive = export_model(module, inputs=["left:float32[batch,3]", "right:float32[batch,5]"], name="pair")
    left, right = np.ones((2, 3), np.float32), np.full((2, 5), 2, np.float32)
    assert ask(archive, left=left, right=right)["output"].tolist() == [-17, -17]
    turned = export_model(module, inputs=["right:float32[batch,5]", "left:float32[batch,3]"], name="pair")
    assert ask(turned, left=left, right=right)["output"].tolist() == [-17, -17]


def notes(archive: Archive) -> str:
    return "\n".join(archive.variant().serving.provenance.notes)


class TestNames:
    def test_a_misspelt_input_is_not_matched_by_position(self) -> None:
        class Minus(torch.nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return x - y

        with pytest.raises(InvalidArgument, match="no parameter 'xx'; its parameters are x, y"):
            export_model(Minus(), inputs=["y:float32[batch,2]", "xx:float32[batch,2]"])

    def test_a_class_is_not_a_module(self) -> None:
        with pytest.raises(InvalidArgument, match=r"pass a module, such as Net\(\)"):
            export_model(models.Net, inputs=["x:float32[batch,4]"])  # type: ignore[arg-type]

    @pytest.mark.matrix
    def test_one_input_may_be_a_text(self) -> None:
        assert export_model(models.Net(), inputs="x:float32[batch,4]").signature.inputs[0].name == "x"

    @pytest.mark.matrix
    def test_a_narrow_batch_is_exported_and_measured_within_its_range(self) -> None:
        archive = export_model(models.Net(), inputs="x:float32[batch=1..4,4]")
        assert archive.signature.batch == "batch"
        assert max(item.rows for item in archive.variant().serving.evidence.latency) == 4


class Lookups(nn.Module):
    """Selects by ``words``, which PyTorch refuses below 0, by ``rows``, which may count from the end, and by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1200, 4)
        self.table = nn.Buffer(torch.randn(2000, 4))

    def forward(self, words: torch.Tensor, rows: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        selected: torch.Tensor = self.words(words).sum(1)
        return selected + self.table[rows + 5] + self.table[steps.cumsum(1)].sum(1)


@pytest.mark.one_case
@pytest.mark.parametrize("target", ["onnx", "pt2"])
def test_inputs_that_are_indices_have_the_ranges_that_pytorch_accepts(target: Literal["onnx", "pt2"]) -> None:
    """A GPU answers an index out of range with zeros, or is lost."""
    inputs = ["words:int64[batch,seq]", "rows:int64[batch]", "steps:int64[batch,seq]"]
    archive = export_model(Lookups(), inputs=inputs, target=target)
    ends = {name: str(span) for name, span in archive.signature.values.items()}
    assert ends == {"words": "0..1199", "rows": "-2005..1994"}
    assert "it selects from 1200 of 'words.weight' in node" in str(archive.signature.values["words"].source)
    notes = "\n".join(archive.variant().serving.provenance.notes)
    assert "indices depend on the values of 'steps' (node " in notes
    assert "such as --input 'steps:int64[batch,seq]=0..100'" in notes
    assert "'rows'" not in notes
