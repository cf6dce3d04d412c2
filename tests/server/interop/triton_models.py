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


def controlled(path: Path, ending: bool) -> Path:
    """OUTPUT = INPUT, 1 more at the start of a sequence; with ``ending`` also its id more at the end: INT32 [batch, 1].

    As in Triton's repository, START, READY, END and CORRID are inputs that the server fills in.
    """
    nodes = [
        helper.make_node("Add", ["INPUT", "START"], ["started"]),
        helper.make_node("Mul", ["started", "READY"], ["OUTPUT" if not ending else "ready"]),
    ]
    kind = TensorProto.INT32
    inputs: list[tuple[str, int, Dims]] = [(name, kind, (f"{name}_n", 1)) for name in ("INPUT", "START", "READY")]
    if ending:
        nodes += [
            helper.make_node("Cast", ["CORRID"], ["id"], to=TensorProto.INT32),
            helper.make_node("Mul", ["id", "END"], ["ended"]),
            helper.make_node("Add", ["ready", "ended"], ["OUTPUT"]),
        ]
        inputs += [("END", kind, ("END_n", 1)), ("CORRID", TensorProto.UINT64, ("CORRID_n", 1))]
    return save(path, nodes, inputs, [("OUTPUT", kind, ("OUTPUT_n", 1))])


def accumulator(path: Path) -> Path:
    """OUTPUT = the sum of INPUT over a sequence, with implicit state; INPUT is scaled by an optional input, 1."""
    one = numpy_helper.from_array(np.array([1], np.float32), "SCALE")
    nodes = [
        helper.make_node("Mul", ["INPUT", "SCALE"], ["scaled"]),
        helper.make_node("Add", ["scaled", "SUM_IN"], ["SUM_OUT"]),
        helper.make_node("Identity", ["SUM_OUT"], ["OUTPUT"]),
    ]
    kind = TensorProto.FLOAT
    inputs: list[tuple[str, int, Dims]] = [(name, kind, (f"{name}_n", 2)) for name in ("INPUT", "SUM_IN")]
    outputs: list[tuple[str, int, Dims]] = [(name, kind, (f"{name}_n", 2)) for name in ("OUTPUT", "SUM_OUT")]
    return save(path, nodes, [*inputs, ("SCALE", kind, (1,))], outputs, [one])


def classifier(path: Path, image: tuple[str, Dims], scores: tuple[str, Dims], channel: int) -> Path:
    """Score class c by the mean of channel 0 times c, modulo 7; the shapes are those of the model's own tensors."""
    axes = numpy_helper.from_array(np.array([axis for axis in (1, 2, 3) if axis != channel], np.int64), "axes")
    count = int(scores[1][1])
    weights = numpy_helper.from_array((np.arange(3 * count).reshape(3, count) % 7).astype(np.float32), "weights")
    size = numpy_helper.from_array(np.array([0, *scores[1][1:]], np.int64), "size")
    nodes = [
        helper.make_node("ReduceMean", [image[0], "axes"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "weights"], ["flat"]),
        helper.make_node("Reshape", ["flat", "size"], [scores[0]]),
    ]
    float32 = TensorProto.FLOAT
    shapes = [(image[0], float32, image[1])], [(scores[0], float32, scores[1])]
    return save(path, nodes, *shapes, [axes, weights, size])


def _tensor(name: str, kind: str, dims: str, more: str = "") -> str:
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] {more} }}'


def _config(inputs: str, outputs: str, more: str = "", batch: int = 8) -> str:
    return (
        f'platform: "onnxruntime_onnx"\nmax_batch_size: {batch}\n'
        f"input [ {inputs} ]\noutput [ {outputs} ]\ninstance_group [ {{ kind: KIND_CPU }} ]\n{more}"
    )


def _control(name: str, kind: str, value: str = "int32_false_true: [ 0, 1 ]") -> str:
    return f'{{ name: "{name}" control [ {{ kind: CONTROL_SEQUENCE_{kind} {value} }} ] }}'


def repository(folder: Path) -> Path:
    """Write models with the names, tensors and settings of Triton's example repository."""
    (ins, outs), (texts, others) = (
        [", ".join(_tensor(f"{side}{index}", kind, "16") for index in "01") for side in ("INPUT", "OUTPUT")]
        for kind in ("INT32", "STRING")
    )
    step = _tensor("INPUT", "INT32", "1"), _tensor("OUTPUT", "INT32", "1")
    start, ready = _control("START", "START"), _control("READY", "READY")
    more = f"{_control('END', 'END')}, {_control('CORRID', 'CORRID', 'data_type: TYPE_UINT64')}"
    labels = 'label_filename: "labels.txt"'
    one = _tensor("fc6_1", "FP32", "1000", f"reshape {{ shape: [ 1, 1000, 1, 1 ] }} {labels}")
    queue = "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 9 max_queue_size: 4 }"
    configs = {
        "simple": _config(ins, outs, f"dynamic_batching {{ preserve_ordering: true priority_levels: 2 {queue} }}"),
        "simple_string": _config(texts, others),
        "simple_identity": _config(_tensor("INPUT0", "STRING", "-1"), _tensor("OUTPUT0", "STRING", "-1")),
        "simple_sequence": _config(*step, f"sequence_batching {{ control_input [ {start}, {ready} ] }}"),
        "simple_dyna_sequence": _config(
            *step,
            "sequence_batching { max_sequence_idle_microseconds: 10000000 oldest { max_candidate_sequences: 1024 } "
            f"control_input [ {start}, {ready}, {more} ] }}\n"
            'parameters [ { key: "execute_delay_ms" value: { string_value: "3" } } ]',
        ),
        "accumulator": _config(
            _tensor("INPUT", "FP32", "2") + ", " + _tensor("SCALE", "FP32", "1", "optional: true"),
            _tensor("OUTPUT", "FP32", "2"),
            'sequence_batching { state [ { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 '
            "dims: [ 2 ] } ] }",
        ),
        "densenet_onnx": _config(
            _tensor("data_0", "FP32", "3, 32, 32", "reshape { shape: [ 1, 3, 32, 32 ] } format: FORMAT_NCHW"),
            one,
            batch=0,
        ),
        "densenet_batch": _config(
            _tensor("data_0", "FP32", "3, 32, 32", "format: FORMAT_NCHW"),
            _tensor("fc6_1", "FP32", "1000", f"reshape {{ shape: [ 1000, 1, 1 ] }} {labels}"),
            batch=1,
        ),
        "inception_onnx": _config(
            _tensor("input", "FP32", "29, 29, 3", "format: FORMAT_NHWC"),
            _tensor("InceptionV3/Predictions/Softmax", "FP32", "1001", labels),
            batch=128,
        ),
    }
    for name, config in configs.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
        file = folder / name / "1" / "model.onnx"
        if name in ("simple", "simple_string"):
            kind = TensorProto.INT32 if name == "simple" else TensorProto.STRING
            simple(file.parent, "model", kind)
        elif name == "simple_identity":
            identity(file.parent, "model", DType.BYTES)
        elif "sequence" in name:
            controlled(file, ending="dyna" in name)
        elif name == "accumulator":
            accumulator(file)
        elif name == "inception_onnx":
            classifier(file, ("input", ("n", 29, 29, 3)), ("InceptionV3/Predictions/Softmax", ("m", 1001)), 3)
        else:
            classifier(file, ("data_0", (1, 3, 32, 32)), ("fc6_1", (1, 1000, 1, 1)), 1)
        if labels in config:
            (folder / name / "labels.txt").write_text("".join(f"class {number}\n" for number in range(1001)))
    return folder
