"""Removal of unused nodes."""

from __future__ import annotations

from torch import fx


def drop_unused(graph: fx.Graph) -> None:
    """Remove the nodes whose results nothing uses and that do nothing else.

    ``torch.vmap`` leaves calls in a graph that open and close a level of batching, which PyTorch considers unused.
    """
    graph.eliminate_dead_code(lambda node: node.is_impure() or "functorch" in _module(node.target))


def _module(target: object) -> str:
    return str(getattr(target, "__module__", ""))
