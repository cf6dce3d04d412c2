"""Half precision in ONNX graphs: conversion, operators that stay in float32, and rounding."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ingot.errors import InvalidArgument, QuantizationError
from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.quant.schemes import half
from ingot.tensors import Array

FP16, BF16, FP32 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT
X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


def parse(body: str, opset: int = 20, **weights: Array) -> ir.Model:
    """Return a model of ``x`` [b, 4] and ``y``, written in ONNX's own text form."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[b, 4] x) => (float[b, n] y) {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    for name, array in weights.items():
        held = ir.Tensor(array, name=name)
        value = next(value for node in model.graph.all_nodes() for value in node.inputs if value and value.name == name)
        value.const_value, value.type, value.shape = held, ir.TensorType(held.dtype), ir.Shape(array.shape)
        model.graph.register_initializer(value)
    return model


def run(model: ir.Model, x: Array = X) -> Array:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return result


def types(model: ir.Model) -> dict[str, ir.DataType | None]:
    """Return the type of each operator's output."""
    return {node.op_type: node.outputs[0].dtype for node in model.graph if node.op_type != "Cast"}


LAYER = "a = MatMul(x, w) b = Add(a, c) d = Relu(b) y = Softmax(d)"
C = np.array([0.1, 0.2, 0.3], np.float32)


def test_layers_and_what_follows_them_are_converted_and_softmax_is_not() -> None:
    model, plain = parse(LAYER, w=W, c=C), parse(LAYER, w=W, c=C)
    done = half.apply(model, FP16)
    assert done == half.Halved({"MatMul": 1, "Add": 1, "Relu": 1})
    assert types(model) == {"MatMul": FP16, "Add": FP16, "Relu": FP16, "Softmax": FP32}
    assert [model.graph.inputs[0].dtype, model.graph.outputs[0].dtype] == [FP32, FP32]
    assert {name: value.dtype for name, value in model.graph.initializers.items()} == {"w": FP16, "c": FP16}
    np.testing.assert_allclose(run(model), run(plain), atol=2e-3)


def test_an_output_in_half_precision_is_cast_back_under_its_name() -> None:
    model = parse("a = MatMul(x, w) y = Relu(a)", w=W)
    half.apply(model, FP16)
    assert (model.graph.outputs[0].name, model.graph.outputs[0].dtype) == ("y", FP32)
    np.testing.assert_allclose(run(model), np.maximum(X @ W, 0), atol=1e-2)


@pytest.mark.parametrize(("dtype", "kind"), [(FP16, np.float16), (BF16, ml_dtypes.bfloat16)])
def test_the_emulation_rounds_exactly_where_a_gpu_would(dtype: ir.DataType, kind: type) -> None:
    def rounded(array: Array) -> Array:
        return array.astype(kind).astype(np.float32)

    model = parse("a = MatMul(x, w) b = Reshape(a, s) d = Add(b, c) y = Neg(d)", w=W, c=C, s=np.array([-1, 3]))
    half.emulated(model, dtype)
    assert set(types(model).values()) == {FP32}
    expected = -rounded(rounded(rounded(X) @ rounded(W)) + rounded(C))
    np.testing.assert_array_equal(run(model), rounded(expected))


def test_emulation_and_conversion_choose_the_same() -> None:
    first, second = parse(LAYER, w=W, c=C), parse(LAYER, w=W, c=C)
    assert half.apply(first, BF16) == half.emulated(second, BF16)


def test_a_layer_with_weights_beyond_the_range_stays_and_is_named() -> None:
    model = parse("a = MatMul(x, w) y = MatMul(a, v)", w=W, v=np.full((3, 2), 1e5, np.float32))
    done = half.apply(model, FP16)
    assert done.operators == {"MatMul": 1}
    assert len(done.notes) == 1
    assert "stays in float32: it holds numbers beyond float16" in done.notes[0]
    assert half.apply(parse("a = MatMul(x, w) y = MatMul(a, v)", w=W, v=np.full((3, 2), 1e5, np.float32)), BF16) == (
        half.Halved({"MatMul": 2})
    )


def test_infinity_among_the_weights_is_meant() -> None:
    mask = np.array([0, -np.inf, 0], np.float32)
    assert half.apply(parse("a = MatMul(x, w) y = Add(a, c)", w=W, c=mask), FP16).operators["Add"] == 1


@pytest.mark.parametrize(("dtype", "number"), [(FP16, 1e-12), (BF16, np.finfo(np.float32).min)])
def test_a_number_that_becomes_zero_or_infinite_keeps_its_operator(dtype: ir.DataType, number: float) -> None:
    model = parse("a = MatMul(x, w) y = Add(a, c)", w=W, c=np.array(number, np.float32))
    assert half.apply(model, dtype).operators == {"MatMul": 1}
    assert types(model)["Add"] == FP32


def test_constants_within_the_graph_are_found() -> None:
    model = parse("a = MatMul(x, w) t = Constant<value_float = 1e-12>() k = Constant<value = float {2}>() "
                  "b = Mul(a, k) y = Add(b, t)", w=W)  # fmt: skip
    assert half.apply(model, FP16).operators == {"MatMul": 1, "Mul": 1}
    np.testing.assert_allclose(run(model), X @ W * 2, atol=2e-2)


def test_kept_nodes_stay_exact() -> None:
    model = parse("a = MatMul(x, w) y = MatMul(a, v)", w=W, v=W[:3])
    first = next(iter(model.graph))
    assert half.apply(model, FP16, keep=[first]).operators == {"MatMul": 1}
    assert model.graph.initializers["w"].dtype == FP32
    assert first.outputs[0].dtype == FP32


def test_a_weight_that_is_wanted_in_both_precisions_is_stored_once() -> None:
    model = parse("a = MatMul(x, w) b = Softmax(w) d = ReduceSum(b) y = Add(a, d)", w=W)
    half.apply(model, FP16)
    assert [value.dtype for value in model.graph.initializers.values()] == [FP32]
    run(model)


def test_embeddings_are_converted() -> None:
    model = parse("i = Cast<to = 7>(x) e = Gather(w, i) y = ReduceSum<keepdims = 0>(e, k)", w=W, k=np.array([-1]))
    assert half.apply(model, FP16).operators == {"Gather": 1}
    assert run(model, np.zeros((2, 4), np.float32)).shape == (2, 4)


def test_bodies_stay_in_float32_and_may_use_outer_values() -> None:
    body = """a = MatMul(x, w) r = Relu(a) s = ReduceSum<keepdims = 0>(a) z = Constant<value_float = 0.0>()
        g = Greater(s, z)
        y = If(g) <then_branch = t () => (float[b, n] u) { u = Mul(r, a) }, else_branch = f () => (float[b, n] v)
        { v = Add(r, a) }>"""
    model, plain = parse(body, w=W), parse(body, w=W)
    assert half.apply(model, FP16).operators == {"MatMul": 1, "Relu": 1}
    np.testing.assert_allclose(run(model), run(plain), atol=5e-2)


def test_recurrent_layers_stay_in_float32() -> None:
    body = """a = MatMul(x, w) k = Constant<value_ints = [1]>() s = Unsqueeze(a, k) h = LSTM<hidden_size = 2>(s, i, r)
        f = Flatten<axis = 3>(h) m = Constant<value_ints = [-1, 2]>() t = Reshape(f, m) y = MatMul(t, v)"""
    weights = [np.full(shape, 0.1, np.float32) for shape in ((1, 8, 3), (1, 8, 2), (2, 3))]
    model, plain = (parse(body, w=W, i=weights[0], r=weights[1], v=weights[2]) for _ in range(2))
    assert half.apply(model, FP16).operators == {"MatMul": 2, "Unsqueeze": 1}
    assert types(model)["LSTM"] == FP32
    np.testing.assert_allclose(run(model), run(plain), atol=1e-3)


def test_types_that_a_file_does_not_state_are_inferred() -> None:
    model = parse(LAYER, w=W, c=C)
    assert all(node.outputs[0].dtype is None for node in list(model.graph)[:-1])
    assert half.apply(model, FP16).operators["Relu"] == 1


def test_bfloat16_is_used_where_the_operator_set_has_it() -> None:
    body = "r = Reshape(x, s) a = Conv(r, w) y = Flatten(a)"
    w, s = np.ones((2, 1, 3), np.float32), np.array([-1, 1, 4])
    with pytest.raises(QuantizationError, match=r"1 Conv stay in float32: .* opset 20; export it with opset 22"):
        half.apply(parse(body, w=w, s=s), BF16)
    assert half.apply(parse(body, opset=22, w=w, s=s), BF16).operators == {"Conv": 1, "Flatten": 1}


def test_a_model_without_layers_is_refused() -> None:
    for transform in (half.apply, half.emulated, half.stored):
        with pytest.raises(QuantizationError):
            transform(parse("y = Relu(x)"), FP16)


def test_another_type_is_refused() -> None:
    for transform in (half.apply, half.emulated, half.stored):
        with pytest.raises(InvalidArgument, match="there are FLOAT16 and BFLOAT16"):
            transform(parse(LAYER, w=W, c=C), ir.DataType.INT8)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_stored_weights_are_half_the_size_and_computed_in_float32(dtype: ir.DataType, tmp_path: Path) -> None:
    weight = np.random.default_rng(2).standard_normal((4, 1 << 18)).astype(np.float32)
    model = parse("a = MatMul(x, w) y = Add(a, c)", w=weight, c=np.ones(1, np.float32))
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")
    model = ir.load(tmp_path / "m.onnx")
    assert half.stored(model, dtype) == half.Halved({"MatMul": 1})
    blobs = BlobFolder.scratch()
    graph, weights = onnx_graph.pack(model, blobs)
    assert [blob.size for blob in weights] == [weight.nbytes // 2]
    session = onnxruntime.InferenceSession(blobs.path(graph), providers=["CPUExecutionProvider"])
    expected = X @ weight.astype(dtype.numpy()).astype(np.float32) + 1
    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-4, atol=1e-5)


def test_kept_weights_are_not_stored_in_half_precision() -> None:
    first, second = np.ones((4, 512), np.float32), np.ones((512, 512), np.float32)
    model = parse("a = MatMul(x, w) y = MatMul(a, v)", w=first, v=second)
    kept = next(iter(model.graph))
    assert half.stored(model, FP16, [kept]) == half.Halved({"MatMul": 1})
    assert {name: value.dtype for name, value in model.graph.initializers.items()} == {"w": FP32, "v": FP16}
    single = parse("y = MatMul(x, w)", w=first)
    with pytest.raises(QuantizationError, match="to store in half precision, but for those to keep"):
        half.stored(single, FP16, list(single.graph))


def test_weights_are_converted_when_they_are_written_one_at_a_time(tmp_path: Path) -> None:
    weight = np.ones((4, 1 << 18), np.float32)
    ir.save(parse("y = MatMul(x, w)", w=weight), tmp_path / "m.onnx", external_data="m.data")
    model = ir.load(tmp_path / "m.onnx")
    half.apply(model, FP16)
    held = model.graph.initializers["w"].const_value
    assert isinstance(held, ir.LazyTensor)
    assert (held.nbytes, held.numpy().dtype.name) == (weight.nbytes // 2, "float16")
    assert Counter(node.op_type for node in model.graph) == {"Cast": 2, "MatMul": 1}
