"""The files beside an ONNX graph that hold its tensors."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ingot.model_store.format import onnx_graph


def locations(path: Path, called: str) -> tuple[str, ...]:
    """Return what a graph calls the files of its external data. They are not opened.

    Args:
        path: the graph.
        called: what messages call it.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not an ONNX model.
    """
    model = onnx_graph.load(path, called)
    tensors = (
        value.const_value for graph in (model.graph, *model.graph.subgraphs()) for value in graph.initializers.values()
    )
    return tuple(dict.fromkeys(str(item.location) for item in tensors if isinstance(item, ir.ExternalTensor)))
