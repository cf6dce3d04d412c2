from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.quant_utils import QuantFormat
from torch import nn

from ingot.export.rewrite.rules.onnx import DequantMatmul
from ingot.tensors import Array
from tests.export.rewrite.rules.onnx.support import apply, export, operators, run, untouched

INT4, UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)


def tensor(name: str, array: Array) -> onnx.TensorProto:
    if array.dtype in (INT4, UINT4):
        kind = TensorProto.INT4 if array.dtype == INT4 else TensorProto.UINT4
        return helper.make_tensor(name, kind, array.shape, array.astype(np.int16).reshape(-1).tolist())
    return numpy_helper.from_array(array, name)


def product(
    kind: str = "int4",
    scales: tuple[int, ...] = (3, 10),
    rows: int = 96,
    columns: int = 10,
    *,
    transposed: bool = False,
    zeros: bool = False,
    quantized_input: bool = False,
    axis: int = 1,
    block_size: int = 0,
) -> ir.Model:
    """x [batch, seq, rows] times dequantized weights [rows, columns], or [columns, rows] and then transposed."""
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    rng = np.random.default_rng(1)
    low, high = (
        (-8, 8) if kind == "int4" else (0, 16) if kind == "uint4" else (-128, 128) if kind == "int8" else (0, 256)
    )

    def integers(shape: tuple[int, ...]) -> Array:
        return np.asarray(rng.integers(low, high, shape)).astype(np.int16).astype(dtype)

    constants = [
        tensor("w", integers((columns, rows) if transposed else (rows, columns))),
        tensor("scale", np.asarray(rng.random(scales) / 10 + 0.01, np.float32)),
        tensor("x_scale", np.array(0.05, np.float32)),
        tensor("x_zero", np.array(0, np.int8)),
    ]
    if zeros:
        constants.append(tensor("zero", integers(scales)))
    weights = ["w", "scale", *(["zero"] if zeros else [])]
    x = "dequantized" if quantized_input else "x"
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["quantized"]),
        helper.make_node("DequantizeLinear", ["quantized", "x_scale", "x_zero"], ["dequantized"]),
        helper.make_node("DequantizeLinear", weights, ["wide"], axis=axis, block_size=block_size),
        helper.make_node("Transpose", ["wide"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", [x, "turned" if transposed else "wide"], ["y"]),
    ]
    used = nodes[0 if quantized_input else 2 :]
    graph = helper.make_graph(
        used if transposed else [node for node in used if node.op_type != "Transpose"],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "seq", columns])],
        constants,
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize(
    "form",
    [
        {"scales": (3, 10), "axis": 0, "block_size": 32},
        {"scales": (10, 3), "axis": 1, "block_size": 32, "transposed": True},
        {"scales": (7, 10), "axis": 0, "block_size": 16, "rows": 100},
        {"scales": (10,), "axis": 1},
        {"scales": (10,), "axis": 0, "transposed": True, "rows": 300},
        {"scales": ()},
    ],
    ids=["blocks", "turned blocks", "a broken block", "columns", "turned columns", "one"],
)
def test_weights_of_few_bits_are_multiplied_as_they_are_stored(kind: str, zeros: bool, form: dict[str, int]) -> None:
    # ONNX Runtime's own fusion of this would round the activations to 8 bits: without it, the two must be equal.
    found = apply(DequantMatmul(), product(kind, zeros=zeros, **form), 1, tolerance=1e-4, optimized=False)  # type: ignore[arg-type]
    assert operators(found) == {"com.microsoft.MatMulNBits": 1}


@pytest.mark.matrix
def test_the_layers_of_a_model_that_was_quantized_are_found(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
    exported = export(module, torch.randn(2, 5, 64), seq=1, opset=21)
    quantizer = MatMulNBitsQuantizer(ir.to_proto(exported), block_size=32, quant_format=QuantFormat.QDQ)
    quantizer.process()
    quantized = ir.from_proto(onnx.shape_inference.infer_shapes(quantizer.model.model))
    assert operators(quantized)["DequantizeLinear"] == 2
    found = apply(DequantMatmul(), quantized, 2, tolerance=1e-4, optimized=False)
    assert operators(found) == {"com.microsoft.MatMulNBits": 2, "Add": 2, "Relu": 1}


def test_the_engine_alone_would_round_the_activations() -> None:
    model = product(axis=0, block_size=32)
    size = {"batch": 2, "seq": 5}
    exact = run(model, size, optimized=False)["y"]
    assert np.abs(run(model, size)["y"] - exact).max() > 1e-3 * np.abs(exact).max()
    assert np.abs(run(DequantMatmul()(model).graph, size)["y"] - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize(
    "model",
    [
        product(scales=(96,), axis=0),
        product("int8", scales=(10,), axis=1, quantized_input=True),
        product(scales=(2, 10), axis=0, block_size=48),
    ],
    ids=["a scale for each row", "quantized activations", "blocks of an odd size"],
)
def test_products_that_the_kernel_does_not_support_are_left(model: ir.Model) -> None:
    untouched(DequantMatmul(), model)
