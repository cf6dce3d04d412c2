"""Operators with inner graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.bounds.generated import KINDS, Call, Maker
from tests.bounds.recipes.recipe import recipe


def inner(
    name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[tuple[str, int, Any]], outputs: Sequence[str]
) -> onnx.GraphProto:
    ends = [onnx.ValueInfoProto(name=output) for output in outputs]
    return helper.make_graph(nodes, name, [helper.make_tensor_value_info(n, k, shape) for n, k, shape in inputs], ends)


@recipe("If")
def if_(m: Maker, operator: str) -> Call:
    kind = m.pick(*"fit")
    shape = m.shape(2)
    outer = {"one": m.tensor(kind, shape), "two": m.tensor(kind, m.near(shape))}
    branches = {
        branch: inner(branch, [helper.make_node("Identity", [name], [branch])], [], [branch])
        for branch, name in (("then_branch", "one"), ("else_branch", "two"))
    }
    return Call(operator, [m.known_of(np.array(m.chance(0.5)), 9)], attributes=branches, outer=outer)


@recipe("Loop")
def loop(m: Maker, operator: str) -> Call:
    kind, shape = m.pick(*"fit"), m.shape(2)
    join = "StringConcat" if kind == "t" else m.pick("Add", "Max")
    follows = m.pick(join, "Identity")
    body = inner(
        "body",
        [
            helper.make_node("Identity", ["going"], ["goes"]),
            helper.make_node(follows, ["state", "other"] if follows == join else [m.pick("state", "other")], ["next"]),
            helper.make_node("Identity", [m.pick("state", "other")], ["part"]),
        ],
        [("number", TensorProto.INT64, []), ("going", TensorProto.BOOL, []), ("state", KINDS[kind][0], None)],
        ["goes", "next", "part"],
    )
    trips = m.ints(m.pick(0, 1, 3))
    outer = {"other": m.tensor(kind, m.near(shape))}
    return Call(operator, [trips, None, m.tensor(kind, shape)], 2, attributes={"body": body}, outer=outer, since=20)


@recipe("Scan")
def scan(m: Maker, operator: str) -> Call:
    kind, shape = m.pick("f", "i"), m.shape(2)
    body = inner(
        "body",
        [
            helper.make_node("Add", ["state", "slice"], ["next"]),
            helper.make_node(m.pick("Identity", "Shape", "NonZero"), ["slice"], ["part"]),
        ],
        [("state", KINDS[kind][0], None), ("slice", KINDS[kind][0], None)],
        ["next", "part"],
    )
    axis = m.rng.randint(0, len(shape))
    whole = [*shape[:axis], m.size(), *shape[axis:]]
    attributes = {"body": body, "num_scan_inputs": 1, "scan_input_axes": [axis], "scan_output_axes": [m.pick(0, -1)]}
    return Call(operator, [m.tensor(kind, m.near(shape)), m.tensor(kind, whole)], 2, attributes=attributes)
