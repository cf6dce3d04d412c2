"""Graphs shaped like real networks, for every scheme: text, weights, and inputs of five rows or more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random


@dataclass(frozen=True)
class Network:
    """A graph and inputs for it.

    ``integer`` are the integer operators that ONNX Runtime runs after static quantization.
    """

    text: str
    weights: Mapping[str, Array]
    inputs: Mapping[str, Array]
    integer: Mapping[str, int] = field(default_factory=dict)

    def model(self, opset: int = 20, inferred: bool = True) -> ir.Model:
        return graphs.graph(self.text, self.weights, opset=opset, inferred=inferred)

    def half(self) -> Network:
        """Return the same in float16."""
        text = self.text.replace("float[", "float16[")
        return Network(text, graphs.halves(self.weights), graphs.halves(self.inputs))


_IMAGES = {"x": random(12, 4, 9, 9, seed=1)}
_ROWS = {"x": random(40, 16, seed=2)}
_TOKENS = {"x": random(6, 7, 16, seed=3)}
_NARROW = random(8, 4, 3, 3, seed=4, scale=0.3)
_BIAS = random(8, seed=5)
_WEIGHT = random(16, 8, seed=6, scale=0.4)


def _conv(
    attributes: str, weight: Array, out: str, bias: bool = True, inputs: Mapping[str, Array] = _IMAGES
) -> Network:
    dims = ",".join(["batch", *(str(size) for size in inputs["x"].shape[1:])])
    return Network(
        f"(float[{dims}] x) => (float[{out}] y) {{ y = Conv<{attributes}>(x, w{', b' if bias else ''}) }}",
        {"w": weight} | ({"b": random(len(weight), seed=7)} if bias else {}),
        inputs,
        {"QLinearConv": 1},
    )


CONVOLUTIONS: Mapping[str, Network] = {
    "conv": _conv("kernel_shape=[3,3]", _NARROW, "batch,8,7,7"),
    "conv without bias": _conv("kernel_shape=[3,3]", _NARROW, "batch,8,7,7", bias=False),
    "conv with stride, padding and dilation": _conv(
        "kernel_shape=[3,3], strides=[2,2], pads=[2,1,2,1], dilations=[2,1]", _NARROW, "batch,8,5,5"
    ),
    "conv in groups": _conv("kernel_shape=[3,3], group=2", random(8, 2, 3, 3, seed=8), "batch,8,7,7"),
    "depthwise conv": _conv("kernel_shape=[3,3], group=4, pads=[1,1,1,1]", random(4, 1, 3, 3, seed=9), "batch,4,9,9"),
    "depthwise conv with two outputs a channel": _conv(
        "kernel_shape=[3,3], group=4", random(8, 1, 3, 3, seed=9), "batch,8,7,7"
    ),
    "conv of one dimension": _conv(
        "kernel_shape=[3]", random(6, 5, 3, seed=10), "batch,6,18", inputs={"x": random(8, 5, 20, seed=11)}
    ),
    "conv of any length": Network(
        "(float[batch,5,length] x) => (float[batch,6,rest] y) { y = Conv<kernel_shape=[3]>(x, w, b) }",
        {"w": random(6, 5, 3, seed=10), "b": random(6)},
        {"x": random(8, 5, 20, seed=11)},
        {"QLinearConv": 1},
    ),
}
PRODUCTS: Mapping[str, Network] = {
    "matmul": Network(
        "(float[batch,16] x) => (float[batch,8] y) { y = MatMul(x, w) }",
        {"w": _WEIGHT},
        _ROWS,
        {"MatMulIntegerToFloat": 1},
    ),
    "matmul with bias": Network(
        "(float[batch,16] x) => (float[batch,8] y) { p = MatMul(x, w) y = Add(p, b) }",
        {"w": _WEIGHT, "b": _BIAS},
        _ROWS,
        {"QGemm": 1},
    ),
    "matmul with bias first": Network(
        "(float[batch,16] x) => (float[batch,8] y) { p = MatMul(x, w) y = Add(b, p) }",
        {"w": _WEIGHT, "b": _BIAS},
        _ROWS,
        {"QGemm": 1},
    ),
    "matmul of texts": Network(
        "(float[batch,seq,16] x) => (float[batch,seq,8] y) { p = MatMul(x, w) y = Add(p, b) }",
        {"w": _WEIGHT, "b": _BIAS},
        _TOKENS,
        {"MatMulIntegerToFloat": 1},
    ),
    "two matmuls with one weight": Network(
        "(float[batch,16] x) => (float[batch,16] y) { h = MatMul(x, w) t = Tanh(h) y = MatMul(t, w) }",
        {"w": random(16, 16, seed=12, scale=0.3)},
        _ROWS,
        {"MatMulIntegerToFloat": 2},
    ),
    "two matmuls of one input": Network(
        "(float[batch,16] x) => (float[batch,8] y) { a = MatMul(x, w) b = MatMul(x, v) s = Sigmoid(b) y = Mul(a, s) }",
        {"w": _WEIGHT, "v": random(16, 8, seed=13)},
        _ROWS,
        {"MatMulIntegerToFloat": 2},
    ),
    "gemm": Network(
        "(float[batch,16] x) => (float[batch,8] y) { y = Gemm(x, w, b) }",
        {"w": _WEIGHT, "b": _BIAS},
        _ROWS,
        {"QGemm": 1},
    ),
    "gemm turned": Network(
        "(float[batch,16] x) => (float[batch,8] y) { y = Gemm<transB=1>(x, w, b) }",
        {"w": np.ascontiguousarray(_WEIGHT.T), "b": _BIAS},
        _ROWS,
        {"QGemm": 1},
    ),
    "gemm without bias": Network(
        "(float[batch,16] x) => (float[batch,8] y) { y = Gemm<transB=1>(x, w) }",
        {"w": np.ascontiguousarray(_WEIGHT.T)},
        _ROWS,
        {"QGemm": 1},
    ),
    "gemm with one number as bias": Network(
        "(float[batch,16] x) => (float[batch,8] y) { y = Gemm(x, w, b) }",
        {"w": _WEIGHT, "b": random(1)},
        _ROWS,
        {"QGemm": 1},
    ),
    "gemm with a bias of two dimensions": Network(
        "(float[batch,16] x) => (float[batch,8] y) { y = Gemm(x, w, b) }",
        {"w": _WEIGHT, "b": random(1, 8)},
        _ROWS,
        {"QGemm": 1},
    ),
    "gemm of an input as bias": Network(
        "(float[batch,16] x, float[batch,8] z) => (float[batch,8] y) { y = Gemm(x, w, z) }",
        {"w": _WEIGHT},
        {**_ROWS, "z": random(40, 8, seed=14)},
    ),
    "perceptron": Network(
        "(float[batch,16] x) => (float[batch,3] y) "
        "{ a = Gemm<transB=1>(x, w, b) r = Relu(a) c = Gemm<transB=1>(r, v, d) s = Relu(c) y = Gemm<transB=1>(s, u) }",
        {
            "w": random(24, 16, seed=15, scale=0.3),
            "b": random(24, seed=16),
            "v": random(24, 24, seed=17, scale=0.3),
            "d": random(24, seed=18),
            "u": random(3, 24, seed=19),
        },
        _ROWS,
        {"QGemm": 3},
    ),
}
BLOCKS: Mapping[str, Network] = {
    "residual block": Network(
        """(float[batch,4,9,9] x) => (float[batch,3] y) {
            a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w1, b1) ar = Relu(a)
            b = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(ar, w2, b2) br = Relu(b)
            c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(br, w3, b3)
            s = Add(c, ar) sr = Relu(s) p = GlobalAveragePool(sr) f = Flatten(p) y = Gemm<transB=1>(f, w4, b4) }""",
        {
            "w1": random(6, 4, 3, 3, seed=20, scale=0.3),
            "b1": random(6, seed=21),
            "w2": random(6, 6, 3, 3, seed=22, scale=0.3),
            "b2": random(6, seed=23),
            "w3": random(6, 6, 3, 3, seed=24, scale=0.3),
            "b3": random(6, seed=25),
            "w4": random(3, 6, seed=26),
            "b4": random(3, seed=27),
        },
        _IMAGES,
        {"QLinearConv": 3, "QLinearAdd": 1, "QLinearGlobalAveragePool": 1, "QGemm": 1},
    ),
    "inverted residual": Network(
        """(float[batch,4,9,9] x) => (float[batch,4,9,9] y) {
            s = Conv<kernel_shape=[1,1]>(x, w0, b0)
            a = Conv<kernel_shape=[1,1]>(s, w1, b1) ac = Clip(a, zero, six)
            b = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=12>(ac, w2, b2) bc = Clip(b, zero, six)
            c = Conv<kernel_shape=[1,1]>(bc, w3, b3) r = Add(s, c) y = Conv<kernel_shape=[1,1]>(r, w0, b0) }""",
        {
            "w0": random(4, 4, 1, 1, seed=28),
            "b0": random(4, seed=29),
            "w1": random(12, 4, 1, 1, seed=30),
            "b1": random(12, seed=31),
            "w2": random(12, 1, 3, 3, seed=32),
            "b2": random(12, seed=33),
            "w3": random(4, 12, 1, 1, seed=34),
            "b3": random(4, seed=35),
            "zero": np.array(0, np.float32),
            "six": np.array(6, np.float32),
        },
        _IMAGES,
        {"QLinearConv": 5, "QLinearAdd": 1},
    ),
    "branches that are joined": Network(
        """(float[batch,4,9,9] x) => (float[batch,5,4,4] y) {
            a = Conv<kernel_shape=[1,1]>(x, w1, b1) b = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w2, b2)
            ar = Relu(a) br = Relu(b) c = Concat<axis=1>(ar, br) m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(c)
            y = Conv<kernel_shape=[1,1]>(m, w3, b3) }""",
        {
            "w1": random(3, 4, 1, 1, seed=36),
            "b1": random(3, seed=37),
            "w2": random(5, 4, 3, 3, seed=38),
            "b2": random(5, seed=39),
            "w3": random(5, 8, 1, 1, seed=40),
            "b3": random(5, seed=41),
        },
        _IMAGES,
        {"QLinearConv": 3, "QLinearConcat": 1},
    ),
    "conv that is an output too": Network(
        """(float[batch,4,9,9] x) => (float[batch,8,7,7] inner, float[batch,8,7,7] y) {
            inner = Conv<kernel_shape=[3,3]>(x, w, b) r = Relu(inner) y = Conv<kernel_shape=[1,1]>(r, v, d) }""",
        {"w": _NARROW, "b": _BIAS, "v": random(8, 8, 1, 1, seed=42), "d": random(8, seed=43)},
        _IMAGES,
        {"QLinearConv": 2},
    ),
    "relu that is an output too": Network(
        """(float[batch,4,9,9] x) => (float[batch,8,7,7] r, float[batch,8,7,7] y) {
            c = Conv<kernel_shape=[3,3]>(x, w, b) r = Relu(c) y = Conv<kernel_shape=[1,1]>(r, v, d) }""",
        {"w": _NARROW, "b": _BIAS, "v": random(8, 8, 1, 1, seed=42), "d": random(8, seed=43)},
        _IMAGES,
        {"QLinearConv": 2},
    ),
    "one output twice moved": Network(
        """(float[batch,4,9,9] x) => (float[batch,5] y) {
            c = Conv<kernel_shape=[3,3], strides=[3,3]>(x, w, b) r = Reshape(c, to) t = Transpose<perm=[0,2,1]>(r)
            f = Flatten(t) y = Gemm<transB=1>(f, v, d) }""",
        {
            "w": _NARROW,
            "b": _BIAS,
            "to": np.array([0, 8, 9], np.int64),
            "v": random(5, 72, seed=44),
            "d": random(5, seed=45),
        },
        _IMAGES,
        {"QLinearConv": 1, "QGemm": 1},
    ),
    "attention": Network(
        """(float[batch,seq,16] x) => (float[batch,seq,16] y) {
            n = LayerNormalization<axis=-1>(x, g, h) q = MatMul(n, wq) qb = Add(q, bq) k = MatMul(n, wk)
            v = MatMul(n, wv) kt = Transpose<perm=[0,2,1]>(k) s = MatMul(qb, kt) p = Softmax<axis=-1>(s)
            a = MatMul(p, v) o = MatMul(a, wo) ob = Add(o, bo) r = Add(ob, x) n2 = LayerNormalization<axis=-1>(r, g, h)
            u = MatMul(n2, w1) ub = Add(u, b1) gl = Gelu(ub) d = MatMul(gl, w2) y = Add(d, r) }""",
        {
            "g": 1 + random(16, seed=46, scale=0.1),
            "h": random(16, seed=47, scale=0.1),
            **{name: random(16, 16, seed=48 + i, scale=0.25) for i, name in enumerate(("wq", "wk", "wv", "wo"))},
            "bq": random(16, seed=52),
            "bo": random(16, seed=53),
            "w1": random(16, 32, seed=54, scale=0.25),
            "b1": random(32, seed=55),
            "w2": random(32, 16, seed=56, scale=0.2),
        },
        _TOKENS,
        {"MatMulIntegerToFloat": 6},
    ),
    "embedding and pooling": Network(
        """(int64[batch,seq] ids, float[batch,seq,1] mask) => (float[batch,8] y) {
            e = Gather(table, ids) p = MatMul(e, w) m = Mul(p, mask) y = ReduceSum<keepdims=0>(m, axes) }""",
        {"table": random(5000, 16, seed=57), "w": _WEIGHT, "axes": np.array([1], np.int64)},
        {
            "ids": np.random.default_rng(58).integers(0, 5000, (9, 6)),
            "mask": np.random.default_rng(59).integers(0, 2, (9, 6, 1)).astype(np.float32),
        },
        {"MatMulIntegerToFloat": 1},
    ),
    "weight that is an output too": Network(
        "(float[batch,16] x) => (float[batch,8] y, float[16,8] z) { y = MatMul(x, w) z = Neg(w) }",
        {"w": _WEIGHT},
        _ROWS,
    ),
    "without a batch": Network(
        "(float[16] x) => (float[8] y) { y = MatMul(x, w) }", {"w": _WEIGHT}, {"x": random(16, seed=60)}
    ),
    "names that collide": Network(
        """(float[batch,16] x) => (float[batch,8] x_quantized) {
            w_int8 = Identity(x) w_product = MatMul(w_int8, w) w_scale = Relu(w_product) x_scale = MatMul(w_scale, v)
            x_quantized = Relu(x_scale) }""",
        {"w": _WEIGHT, "v": random(8, 8, seed=61)},
        _ROWS,
    ),
    "conv before a branch": Network(
        """(float[batch,4,9,9] x, bool flag) => (float[batch,8,7,7] y) {
            c = Conv<kernel_shape=[3,3]>(x, w, b)
            y = If (flag) <then_branch = yes () => (float[batch,8,7,7] t) { t = Relu(c) },
                           else_branch = no () => (float[batch,8,7,7] f) { f = Conv<kernel_shape=[1,1]>(c, v) }> }""",
        {"w": _NARROW, "b": _BIAS, "v": random(8, 8, 1, 1, seed=62)},
        {**_IMAGES, "flag": np.array(True)},
        {"QLinearConv": 1},
    ),
}
NETWORKS: Mapping[str, Network] = {**CONVOLUTIONS, **PRODUCTS, **BLOCKS}
