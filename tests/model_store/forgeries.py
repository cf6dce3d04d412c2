"""Archives that Ingot does not write, but another program can."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from onnx import TensorProto, helper

from ingot.model_store import Archive, BlobFolder, Descriptor, Serving, Variant, add_variant


def forged(blobs: BlobFolder, serving: Serving, graph: Descriptor, weights: Sequence[Descriptor] = ()) -> Archive:
    """Return an unchecked archive of one variant, as another program can write it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Variant, "check_own", lambda self: None)
        return Archive.create(blobs, [add_variant(blobs, serving, graph, weights, [])])


def external(location: str, name: str = "w") -> TensorProto:
    """Return 3 FP32 values that are in a file next to their graph."""
    made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "12")):
        made.external_data.add(key=key, value=value)
    return made


def adding(weight: TensorProto) -> bytes:
    """Return a model: y = x + weight, FP32 [batch, 3]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Add", ["x", weight.name], ["y"])], "net", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10).SerializeToString()
