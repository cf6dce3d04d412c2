"""The tutorial of custom-ops.md on its own files: captured, rewritten, quantized around, archived, served."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import ingot
from examples.custom_op.model import Gated, train
from ingot.demo import Data, load, predict
from ingot.errors import ExportError
from ingot.export import export_model
from ingot.model_store import BlobFolder, Variant
from ingot.quant import StaticInt8
from tests.support import ROOT

PAGE = ROOT / "docs" / "guides" / "make" / "custom-ops.md"

pytestmark = pytest.mark.matrix

OPERATOR = ("acme", "gated_rms_norm")


@pytest.fixture(scope="module")
def trained() -> tuple[Gated, Data, Data]:
    training, held_out = load()
    return train(training, epochs=4), training, held_out


@pytest.fixture(scope="module")
def archive(trained: tuple[Gated, Data, Data], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive file with the variants int8 and fp32."""
    module, training, _ = trained
    exported = export_model(module, inputs="image:float32[batch,1,8,8]", output_names=["logits"])
    path = tmp_path_factory.mktemp("tutorial") / "gated.ingot"
    config = ingot.QuantConfig(recipe=StaticInt8(), force=True)
    ingot.quantize(exported, {"image": training.images}, config=config).save(path)
    return path


@pytest.fixture(scope="module")
def variants(archive: Path) -> dict[str, Variant]:
    unpacked = ingot.Archive.open(archive).copy_to(BlobFolder.scratch())
    return {variant.name: variant for variant in unpacked.variants}


def test_the_formula_became_the_operator_and_the_graph_is_quantized_around_it(variants: dict[str, Variant]) -> None:
    for name in ("fp32", "int8"):
        model = onnx.load(variants[name].path())
        assert sum((node.domain, node.op_type) == OPERATOR for node in model.graph.node) == 2
        assert [(function.domain, function.name) for function in model.functions] == [OPERATOR]
    makers = {output: node for node in model.graph.node for output in node.output}
    for node in model.graph.node:
        if (node.domain, node.op_type) == OPERATOR:
            # It takes the two halves of a quantized layer's result: integers of a convolution, floats of a product.
            left, right = (makers[name] for name in node.input[:2])
            assert left is right
            assert left.op_type == "Split"
            assert makers[left.input[0]].op_type in ("DequantizeLinear", "Gemm")
        if node.op_type in ("Conv", "Gemm"):
            assert [makers[name].op_type for name in node.input[:2]] == ["DequantizeLinear"] * 2


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_the_archives_graph_runs_in_plain_onnx_runtime(
    variants: dict[str, Variant], trained: tuple[Gated, Data, Data], name: str
) -> None:
    module, _, held_out = trained
    session = onnxruntime.InferenceSession(str(variants[name].path()), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"image": held_out.images})
    expected = predict(module, held_out.images)
    assert (logits.argmax(1) == expected).mean() >= (1 if name == "fp32" else 0.97)


def test_it_is_served_and_answers_as_pytorch_does(archive: Path, trained: tuple[Gated, Data, Data]) -> None:
    module, _, held_out = trained
    with (
        ingot.serve(f"exact={archive}#fp32", f"small={archive}", http_port=0, grpc_port=0) as server,
        ingot.Client(server.http_url) as client,
    ):
        exact, small = (client.infer(model, {"image": held_out.images[:64]})["logits"] for model in ("exact", "small"))
    expected = predict(module, held_out.images[:64])
    assert np.array_equal(exact.argmax(1), expected)
    assert (small.argmax(1) == expected).mean() >= 0.97


def test_the_code_that_the_tutorial_shows_is_that_of_its_files() -> None:
    code = "\n".join(path.read_text() for path in sorted((ROOT / "examples" / "custom_op").iterdir()) if path.is_file())
    shown = re.findall(r"^```(?:python|cpp)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(shown) >= 3
    assert [block for block in shown if block.strip() not in code] == []


def test_the_error_that_the_page_shows_is_what_an_operator_without_translation_gives() -> None:
    class Eigenvalues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values: torch.Tensor = torch.linalg.eigvalsh(x)
            return values

    page = PAGE.read_text()
    [shown] = re.findall(r"^the model has no ONNX form: .*$", page, re.MULTILINE)
    before, after = shown.split("model.py:12")
    with pytest.raises(ExportError) as error:
        export_model(Eigenvalues(), inputs="x:float32[batch,3,3]")
    assert str(error.value).startswith(before)
    assert str(error.value).endswith(after)
