"""Programs whose views no longer fit once their operators are decomposed."""

from __future__ import annotations

import torch
from torch import fx

from ingot.export.torch_internals import with_copied_graph

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def with_copies(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program in which a copy stands before each view.

    A view is captured where the layout of its tensor allows one. A decomposition can give that tensor another layout
    (``scaled_dot_product_attention`` with a bias does, torch 2.13), and then fails. ONNX knows no layouts: there the
    copies are nothing.
    """
    copied = with_copied_graph(exported)
    graph = copied.graph_module.graph
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            with graph.inserting_before(node):
                made = graph.call_function(
                    torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            made.meta = {**source.meta, "val": source.meta["val"].contiguous()}
            node.update_arg(0, made)
    copied.graph_module.recompile()
    return copied
