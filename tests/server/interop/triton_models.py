"""Tiny models with the names and tensors that Triton's public examples and tests of quality expect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from ingot.tensors import DType
from tests.onnx_models import Dims, save


def simple(folder: Path, name: str = "simple", kind: int = TensorProto.INT32) -> Path:
    """OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1: [batch, 16]; texts of numbers are added as numbers."""
    texts = kind == TensorProto.STRING
    nodes = []
    for index in "01":
        numbers = helper.make_node("Cast", [f"INPUT{index}"], [f"n{index}"], to=TensorProto.INT32)
        nodes.append(numbers)
    for index, operator in (("0", "Add"), ("1", "Sub")):
        nodes.append(helper.make_node(operator, ["n0", "n1"], [f"m{index}"]))
        nodes.append(helper.make_node("Cast", [f"m{index}"], [f"OUTPUT{index}"], to=kind))
    shape: Dims = ("batch", 16)
    assert texts or kind in (TensorProto.INT32, TensorProto.INT8)
    inputs = [(f"INPUT{index}", kind, shape) for index in "01"]
    return save(folder / f"{name}.onnx", nodes, inputs, [(f"OUTPUT{index}", kind, shape) for index in "01"])


def identity(folder: Path, name: str, dtype: DType, count: int = 1, shape: Dims = ("batch", "size")) -> Path:
    """OUTPUT0 = INPUT0, and so on."""
    nodes = [helper.make_node("Identity", [f"INPUT{index}"], [f"OUTPUT{index}"]) for index in range(count)]
    shapes = [
        [dim if dim == "batch" or isinstance(dim, int) else f"{dim}{index}" for dim in shape] for index in range(count)
    ]
    inputs = [(f"INPUT{index}", dtype.onnx, sizes) for index, sizes in enumerate(shapes)]
    outputs = [(f"OUTPUT{index}", dtype.onnx, sizes) for index, sizes in enumerate(shapes)]
    return save(folder / f"{name}.onnx", nodes, inputs, outputs)


def sequence(folder: Path) -> Path:
    """OUTPUT = INPUT, 1 more at the start of a sequence: INT32 [batch, 1]; serve it with --states seen=seen_next."""
    one = numpy_helper.from_array(np.array([[1]], np.int32), "one")
    nodes = [
        helper.make_node("Sub", ["one", "seen"], ["first"]),
        helper.make_node("Add", ["INPUT", "first"], ["OUTPUT"]),
        helper.make_node("Add", ["seen", "first"], ["seen_next"]),
    ]
    kind, shape = TensorProto.INT32, ("batch", 1)
    names = [("INPUT", kind, shape), ("seen", kind, shape)], [("OUTPUT", kind, shape), ("seen_next", kind, shape)]
    return save(folder / "simple_sequence.onnx", nodes, *names, [one])


def repeat(folder: Path) -> Path:
    """OUT is one element of IN after the other.

    Serve it with ``--states at=at_next --repeat WAIT=WAIT_next --repeat-until done``.
    """
    one, zero = (
        numpy_helper.from_array(np.array([value], np.int64), name) for value, name in ((1, "one"), (0, "zero"))
    )
    nodes = [
        helper.make_node("Add", ["at", "one"], ["at_next"]),
        helper.make_node("Slice", ["IN", "at", "at_next", "zero"], ["OUT"]),
        helper.make_node("Shape", ["IN"], ["size"]),
        helper.make_node("Identity", ["WAIT"], ["WAIT_next"]),
        helper.make_node("GreaterOrEqual", ["at_next", "size"], ["done"]),
    ]
    inputs: list[tuple[str, int, Dims]] = [
        ("IN", TensorProto.INT32, ("n",)),
        ("DELAY", TensorProto.UINT32, ("m",)),
        ("WAIT", TensorProto.UINT32, (1,)),
    ]
    outputs = [("OUT", TensorProto.INT32, (1,)), ("at_next", TensorProto.INT64, (1,)), ("done", TensorProto.BOOL, (1,))]
    inputs.append(("at", TensorProto.INT64, (1,)))
    outputs.append(("WAIT_next", TensorProto.UINT32, (1,)))
    return save(folder / "repeat_int32.onnx", nodes, inputs, outputs, [one, zero])


def network(folder: Path, name: str, inputs: tuple[str, int, Dims], output: str) -> Path:
    """Return a model of one FP32 output [.., 10] that does not depend on the values of its input."""
    kind, shape = inputs[1], inputs[2]
    batch = shape[0] == "batch"
    scores = numpy_helper.from_array(np.arange(10, dtype=np.float32).reshape((1, 10) if batch else (10,)), "scores")
    nodes: list[NodeProto] = [helper.make_node("Identity", ["scores"], [output])]
    constants = [scores]
    if batch:
        ten = numpy_helper.from_array(np.array([10], np.int64), "ten")
        nodes = [
            helper.make_node("Shape", [inputs[0]], ["rows"], start=0, end=1),
            helper.make_node("Concat", ["rows", "ten"], ["size"], axis=0),
            helper.make_node("Expand", ["scores", "size"], [output]),
        ]
        constants.append(ten)
    wanted: Dims = ("batch", 10) if batch else (10,)
    return save(
        folder / f"{name}.onnx", nodes, [(inputs[0], kind, shape)], [(output, TensorProto.FLOAT, wanted)], constants
    )


def examples(folder: Path) -> list[Path]:
    """Return the models of tritonclient's Python examples."""
    image: Dims = ("batch", 3, 32, 32)
    return [
        simple(folder),
        simple(folder, "simple_string", TensorProto.STRING),
        simple(folder, "simple_int8", TensorProto.INT8),
        identity(folder, "simple_identity", DType.BYTES),
        identity(folder, "custom_identity_int32", DType.INT32),
        network(folder, "densenet_onnx", ("data_0", TensorProto.FLOAT, (3, 224, 224)), "fc6_1"),
        network(folder, "image", ("input", TensorProto.FLOAT, image), "output"),
        network(folder, "preprocess_inception_ensemble", ("INPUT", TensorProto.STRING, ("batch", 1)), "OUTPUT"),
    ]


# L0_infer_zero: the dimensions behind the batch, by datatype and number of tensors.
_ZERO: dict[tuple[DType, str, int], Dims] = {
    (DType.FP32, "float32", 1): ("a",),
    (DType.FP32, "float32", 3): ("a",),
    (DType.FP16, "float16", 1): ("a", "b"),
    (DType.FP16, "float16", 3): ("a", "b"),
    (DType.BYTES, "object", 1): ("a",),
    (DType.BYTES, "object", 3): ("a", "b"),
    (DType.BOOL, "bool", 1): ("a",),
}
_KINDS = ("onnx", "simple_zero", "sequence_zero", "fan_zero")  # the last three are ensembles in Triton


def qa(folder: Path) -> list[Path]:
    """Return the models of Triton's qa/L0_infer_zero, L0_http and L0_input_validation."""
    made = [
        identity(folder, "simple_identity_int64", DType.INT64),
        identity(folder, "string_identity", DType.BYTES, 1, ("size",)),
        identity(folder, "onnx_zero_1_object_1_element", DType.BYTES, 1, ("batch", 1)),
        identity(folder, "pt_identity", DType.FP32, 1, ("batch", 8)),
        simple(folder, "onnx_object_int32_int32", TensorProto.STRING),
    ]
    for (dtype, label, count), shape in _ZERO.items():
        for kind in _KINDS:
            made.append(identity(folder, f"{kind}_zero_{count}_{label}", dtype, count, ("batch", *shape)))
            made.append(identity(folder, f"{kind}_nobatch_zero_{count}_{label}", dtype, count, shape))
    return made


def everything(folder: Path) -> list[Path]:
    """Return all of them."""
    return [*examples(folder), sequence(folder), repeat(folder), *qa(folder)]
