"""The graphs of the benchmark's models, written node by node: the same bytes at every call, and no torch is needed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.tensors import Array


class Graph:
    """A graph in the making. Every input and output has the batch as its first dimension.

    Args:
        name: of the model.
        inputs: element type and shape, without the batch, of each.
    """

    def __init__(self, name: str, inputs: dict[str, tuple[int, tuple[int, ...]]]):
        self._name = name
        self._inputs = [_value(key, kind, shape) for key, (kind, shape) in inputs.items()]
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        output = output or f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def constant(self, values: Array) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        """Return random weights such that values keep their size from layer to layer."""
        return self.constant(self._random.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5))

    def signs(self, outputs: int, inputs: int, each: int) -> str:
        """Return [outputs, inputs] of zeros, with ``each`` ones of random sign in every row.

        Sums of a few multiples of 2^-10 are exact in FP32 in any order, so that answers are equal to the bit whatever
        batch they were computed in. The matrix is stored and multiplied like any other.
        """
        weights = np.zeros((outputs, inputs), np.float32)
        for row in weights:
            row[self._random.choice(inputs, each, replace=False)] = self._random.choice((-1.0, 1.0), each)
        return self.constant(weights)

    def model(self, output: str, width: int) -> onnx.ModelProto:
        ends = [_value(output, TensorProto.FLOAT, (width,))]
        graph = helper.make_graph(self._nodes, self._name, self._inputs, ends, self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def perceptron(name: str, widths: tuple[int, ...]) -> onnx.ModelProto:
    """Return layers with ReLU between them: ``x`` FP32 [batch, first width] -> ``y`` FP32 [batch, last width]."""
    graph = Graph(name, {"x": (TensorProto.FLOAT, widths[:1])})
    value = "x"
    for inputs, outputs in pairwise(widths[:-1]):
        bias = graph.constant(np.zeros(outputs, np.float32))
        value = graph.add("Relu", graph.add("Gemm", value, graph.signs(outputs, inputs, 4), bias, transB=1))
    last = graph.constant(np.arange(1, widths[-1] + 1, dtype=np.float32) / 1024)
    return graph.model(
        graph.add("Gemm", value, graph.signs(widths[-1], widths[-2], 16), last, output="y", transB=1), widths[-1]
    )


def transformer(name: str, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> onnx.ModelProto:
    """Return a BERT with mean pooling: ids and mask INT64 [batch, length] -> ``embedding`` FP32 [batch, width]."""
    sequence = (TensorProto.INT64, (length,))
    graph = Graph(name, {"input_ids": sequence, "attention_mask": sequence})
    floats = graph.add("Cast", "attention_mask", to=TensorProto.FLOAT)
    absent = graph.add("Mul", graph.add("Sub", floats, _scalar(graph, 1.0)), _scalar(graph, 1e4))
    bias = graph.add("Unsqueeze", absent, graph.constant(np.array([1, 2])))  # [batch, 1, 1, length]
    words = graph.add("Gather", graph.weight(vocabulary, width, fan_in=1), "input_ids")
    value = _norm(graph, graph.add("Add", words, graph.weight(length, width, fan_in=1)), width)
    for _ in range(layers):
        attended = _attention(graph, value, bias, width, heads)
        value = _norm(graph, graph.add("Add", value, attended), width)
        inner = graph.add("Gelu", _linear(graph, value, width, 4 * width))
        value = _norm(graph, graph.add("Add", value, _linear(graph, inner, 4 * width, width)), width)
    present = graph.add("Unsqueeze", floats, graph.constant(np.array([2])))  # [batch, length, 1]
    axis = graph.constant(np.array([1]))
    total = graph.add("ReduceSum", graph.add("Mul", value, present), axis, keepdims=0)
    return graph.model(
        graph.add("Div", total, graph.add("ReduceSum", present, axis, keepdims=0), output="embedding"), width
    )


def residual(name: str, *, size: int, classes: int) -> onnx.ModelProto:
    """Return ResNet-18, batch norms folded: ``x`` FP32 [batch, 3, size, size] -> ``y`` FP32 [batch, classes]."""
    graph = Graph(name, {"x": (TensorProto.FLOAT, (3, size, size))})
    value = graph.add("Relu", _convolution(graph, "x", 3, 64, 7, 2))
    value = graph.add("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        inner = graph.add("Relu", _convolution(graph, value, channels, width, 3, stride))
        inner = _convolution(graph, inner, width, width, 3, 1)
        short = value if stride == 1 and channels == width else _convolution(graph, value, channels, width, 1, stride)
        value = graph.add("Relu", graph.add("Add", inner, short))
        channels = width
    pooled = graph.add("Flatten", graph.add("GlobalAveragePool", value))
    weight, bias = graph.weight(classes, channels, fan_in=channels), graph.constant(np.zeros(classes, np.float32))
    return graph.model(graph.add("Gemm", pooled, weight, bias, output="y", transB=1), classes)


def _value(name: str, kind: int, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["batch", *shape])


def _scalar(graph: Graph, value: float) -> str:
    return graph.constant(np.array(value, np.float32))


def _linear(graph: Graph, value: str, inputs: int, outputs: int) -> str:
    product = graph.add("MatMul", value, graph.weight(inputs, outputs, fan_in=inputs))
    return graph.add("Add", product, graph.constant(np.zeros(outputs, np.float32)))


def _norm(graph: Graph, value: str, width: int) -> str:
    ones, zeros = graph.constant(np.ones(width, np.float32)), graph.constant(np.zeros(width, np.float32))
    return graph.add("LayerNormalization", value, ones, zeros, axis=-1)


def _attention(graph: Graph, value: str, bias: str, width: int, heads: int) -> str:
    shape = graph.constant(np.array([0, 0, heads, width // heads]))
    query, key, content = (graph.add("Reshape", _linear(graph, value, width, width), shape) for _ in range(3))
    query = graph.add("Transpose", query, perm=[0, 2, 1, 3])  # [batch, heads, length, width of a head]
    key = graph.add("Transpose", key, perm=[0, 2, 3, 1])
    content = graph.add("Transpose", content, perm=[0, 2, 1, 3])
    scores = graph.add("Mul", graph.add("MatMul", query, key), _scalar(graph, (width // heads) ** -0.5))
    shares = graph.add("Softmax", graph.add("Add", scores, bias), axis=-1)
    joined = graph.add("Transpose", graph.add("MatMul", shares, content), perm=[0, 2, 1, 3])
    flat = graph.add("Reshape", joined, graph.constant(np.array([0, 0, width])))
    return _linear(graph, flat, width, width)


def _convolution(graph: Graph, value: str, inputs: int, outputs: int, kernel: int, stride: int) -> str:
    weight = graph.weight(outputs, inputs, kernel, kernel, fan_in=inputs * kernel * kernel)
    bias = graph.constant(np.zeros(outputs, np.float32))
    pads = [kernel // 2] * 4
    return graph.add("Conv", value, weight, bias, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
