"""Random graphs through bounds and engine: ``make fuzz``, or ``python -m fuzz.onnx_graphs [-max_total_time=60]``.

An input chooses operators and how they are connected, and the inputs' values. A graph that is called bounded must run
without ending the process, and its outputs must be no larger than its peak; one that the engine refuses may be called
anything, but the analysis must end without another error. Half of the inputs choose calls of single operators instead,
of which all that the rules believe is compared; see tests/bounds/generated.py.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

with atheris.instrument_imports(include=["ingot.bounds"]):
    from ingot.bounds import bounds_of
    from ingot.tensors import DType, Signature, TensorSpec
    from tests.bounds.generated import Maker, Outcome, attempt
    from tests.bounds.recipes import RECIPES

_FILE = Path(tempfile.mkdtemp(prefix="ingot-fuzz-")) / "model.onnx"
_INTS = ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Where", "Neg", "Abs")
_SHAPES = ("Expand", "Tile", "Reshape", "Range", "ConstantOfShape", "OneHot", "Shape", "Gather", "Concat", "Unsqueeze")
_MOST_RUN = 64 << 20  # bytes: larger calls are bounded, but slow to run
_CALLS = 8  # later ones use the outputs of earlier ones
_EXTREMES = np.array([0, 1, -1, 2, 7, -(2**63), 2**63 - 1, 1 << 40], np.int64)


def target(data: bytes) -> None:
    """Make one graph or some calls; analyse them, and run them if they are bounded."""
    dice = random.Random(data)
    if dice.random() < 0.5:
        _calls(dice)
    else:
        _whole(dice)


def _calls(dice: random.Random) -> None:
    maker, outcome = Maker(dice), Outcome()
    for domain, operator in dice.choices(sorted(RECIPES), k=_CALLS):
        attempt(maker, RECIPES[domain, operator](maker, operator), outcome)
    if outcome.wrong:
        raise AssertionError(outcome.wrong[0])


def _whole(dice: random.Random) -> None:
    model, outputs = _graph(dice)
    _FILE.write_bytes(model.SerializeToString())
    signature = Signature(
        (TensorSpec("x", DType.INT64, ("batch", 3)), TensorSpec("n", DType.INT64, (1,))),
        tuple(TensorSpec(name, DType.INT64, ()) for name in outputs),
        None,
    )
    bounds = bounds_of(_FILE, signature)
    if not bounds.bounded:
        if not bounds.reasons:
            raise AssertionError("a graph that is not bounded has no reasons")
        return
    batch = dice.choice((1, 2, 5))
    peak = bounds.peak({"batch": batch})
    if peak > _MOST_RUN:
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    numbers = np.random.default_rng(dice.randrange(1 << 32))
    inputs = {"x": numbers.choice(_EXTREMES, (batch, 3)), "n": numbers.choice(_EXTREMES, (1,))}
    try:
        session = onnxruntime.InferenceSession(_FILE, options, providers=["CPUExecutionProvider"])
        answers = session.run(None, inputs)
    except Exception:  # noqa: BLE001 - the engine refuses most of these graphs
        return
    held = sum(answer.nbytes for answer in answers)
    if held > peak:
        raise AssertionError(f"outputs of {held} bytes, but a peak of {peak}: {bounds.formula}")


def _graph(dice: random.Random) -> tuple[onnx.ModelProto, list[str]]:
    known = ["x", "n"]
    constants = [
        numpy_helper.from_array(np.array(values, np.int64), f"c{number}")
        for number, values in enumerate(([2], [1, 3], [dice.choice(_EXTREMES.tolist())], [dice.randrange(6), 2], [-1]))
    ]
    single = [numpy_helper.from_array(np.array(value, np.int64), f"s{value}") for value in (0, 1, 4)]
    names = [item.name for item in constants]
    nodes = []
    for number in range(dice.randint(1, 6)):
        name, operator = f"v{number}", dice.choice((*_INTS, *_SHAPES))
        first, second = dice.choice(known), dice.choice([*known, *names])
        inputs: list[str] = [first, second]
        attributes: dict[str, Any] = {}
        if operator in ("Neg", "Abs", "Shape"):
            inputs = [first]
        elif operator == "ConstantOfShape":
            inputs = [second]
        elif operator == "Where":
            nodes.append(helper.make_node("Equal", [first, second], [f"{name}_is"]))
            inputs = [f"{name}_is", first, second]
        elif operator == "Range":
            nodes.append(helper.make_node("Squeeze", [second], [f"{name}_end"]))
            inputs = ["s0", f"{name}_end", "s1"]
        elif operator == "OneHot":
            inputs = [first, "s4" if dice.random() < 0.5 else second, "c3"]
        elif operator == "Concat":
            attributes = {"axis": 0}
        elif operator == "Unsqueeze":
            inputs = [first, "c0"]
        nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        if operator == "ConstantOfShape":  # floats by default
            nodes[-1].attribute.append(
                helper.make_attribute("value", helper.make_tensor("value", TensorProto.INT64, [1], [1]))
            )
        known.append(name)
    outputs = [known[-1]]
    graph = helper.make_graph(
        nodes,
        "random",
        [
            helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 3]),
            helper.make_tensor_value_info("n", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in outputs],
        [*constants, *single],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), outputs


def main() -> None:
    atheris.Setup([*sys.argv, "-max_len=64"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
