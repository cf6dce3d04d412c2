"""Half precision in captured programs, for processors with matrix units for it and for GPUs.

Linear layers, convolutions, matrix products, attention and embeddings have inputs and outputs of 16 bits. The rest
computes in float32, into which the compiler fuses the conversions. Weights are stored in 16 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ingot.errors import InvalidArgument, QuantizationError
from ingot.export.capture import exported
from ingot.export.program import Program, quiet
from ingot.quant.variants.programs import graph

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.linear.default,
        aten.conv1d.default,
        aten.conv2d.default,
        aten.conv3d.default,
        aten.conv_transpose1d.default,
        aten.conv_transpose2d.input,
        aten.conv_transpose3d.input,
        aten.embedding.default,
        aten.matmul.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.scaled_dot_product_attention.default,
    }
)


def convert(program: Program, dtype: torch.dtype = torch.bfloat16, *, keep: Collection[str] = ()) -> Program:
    """Return a program in half precision; its inputs and outputs stay as they are.

    Args:
        program: in float32.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        keep: names or prefixes of layers that stay in float32, as do those whose weights exceed the range of ``dtype``.

    Raises:
        InvalidArgument: there is no layer that ``keep`` names, or the type is not a half precision.
        QuantizationError: the model has no such layers, or it cannot be captured again.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise InvalidArgument(f"{dtype} is not a half precision; there are torch.bfloat16 and torch.float16")
    module = exported.unguarded(program.exported)
    kept = graph.kept(module.graph, keep)
    weights: dict[str, str] = {}
    count = 0
    for node in list(module.graph.nodes):
        if node.target in _PRODUCTS and node not in kept and _value(module, node).dtype is torch.float32:
            count += _narrow(module, node, dtype, weights)
    if not count:
        raise QuantizationError("the model has no float32 layers to convert to half precision")
    module.graph.eliminate_dead_code()
    with quiet():  # torch warns about its own copies; unused values are dropped
        module = fx.GraphModule(module, module.graph)
    return graph.capture(module, program)


def _narrow(module: fx.GraphModule, node: fx.Node, dtype: torch.dtype, weights: dict[str, str]) -> bool:
    """Convert the inputs and outputs of a call to half precision; return whether that was possible."""
    taken = [item for item in node.all_input_nodes if _value(module, item).dtype is torch.float32]
    constants = [item for item in taken if item.op == "get_attr"]
    if any(not _fits(_value(module, item), dtype) for item in constants):
        return False
    with module.graph.inserting_before(node):
        for item in taken:
            if item.op == "get_attr":
                narrow = module.graph.get_attr(_weight(module, str(item.target), dtype, weights))
            else:
                narrow = module.graph.call_function(aten.to.dtype, (item, dtype))
            node.replace_input_with(item, narrow)
    with module.graph.inserting_after(node):
        wide = module.graph.call_function(aten.to.dtype, (node, torch.float32))
    wide.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    return True


def _weight(module: fx.GraphModule, name: str, dtype: torch.dtype, weights: dict[str, str]) -> str:
    """Return the name of a weight in half precision, converted once."""
    if name not in weights:
        weights[name] = path = f"{name}_half"
        owner, _, last = path.rpartition(".")
        module.get_submodule(owner).register_buffer(last, operator.attrgetter(name)(module).detach().to(dtype))
    return weights[name]


def _value(module: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module)
    return node.meta["val"]


def _fits(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    finite = tensor[tensor.isfinite()]
    return bool(finite.to(dtype).isfinite().all())
