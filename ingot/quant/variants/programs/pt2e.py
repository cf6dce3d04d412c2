"""Static and dynamic int8 by torchao's PT2E, compiled with AOTInductor into oneDNN's integer kernels.

torchao recognizes layers by the origin of their calls, and silently skips those that it does not recognize: after a
capture that is not strict, or in a rewritten graph, it quantizes no convolution, and none of several that share one
ReLU module. Each call is therefore marked here as coming from its own module, and the quantized layers are counted.

The result goes to AOTInductor only. PyTorch's exporter does write it as ONNX, but torchao quantizes no value between a
convolution and the residual that it is added to, and ONNX Runtime then computes such convolutions in floats, with
useless roundings between them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ingot.errors import QuantizationError, missing_package
from ingot.export.capture import exported
from ingot.export.lower import aoti
from ingot.export.lower.packed import Packed
from ingot.export.program import Program, quiet
from ingot.model_store import BlobFolder
from ingot.quant.data.samples import Samples
from ingot.quant.variants.programs import graph
from ingot.runtime.machine import devices

aten = torch.ops.aten

_SOURCES: dict[Any, Any] = {
    aten.linear.default: nn.Linear,
    aten.conv1d.default: nn.Conv1d,
    aten.conv2d.default: nn.Conv2d,
    aten.relu.default: nn.ReLU,
    aten.relu_.default: nn.ReLU,
    aten.relu6.default: nn.ReLU6,
    aten.hardtanh.default: nn.Hardtanh,
    aten.hardtanh_.default: nn.Hardtanh,
    aten.hardswish.default: nn.Hardswish,
    aten.hardswish_.default: nn.Hardswish,
    aten.silu.default: nn.SiLU,
    aten.silu_.default: nn.SiLU,
    aten.gelu.default: nn.GELU,
    aten.tanh.default: nn.Tanh,
    aten.leaky_relu.default: nn.LeakyReLU,
    aten.max_pool2d.default: nn.MaxPool2d,
    aten.add.Tensor: operator.add,
    aten.add_.Tensor: operator.add,
}
# Linear layers first.
_LAYERS = (aten.linear.default, aten.conv1d.default, aten.conv2d.default)


@dataclass(frozen=True)
class Quantized:
    """A quantized program.

    Attributes:
        program: the quantized program, with the original's inputs and outputs.
        layers: the names of the quantized layers.
        operators: the number of each kind: ``conv2d``, ``linear``.
    """

    program: Program
    layers: tuple[str, ...]
    operators: dict[str, int]


def quantize(program: Program, samples: Samples, *, keep: Collection[str] = (), dynamic: bool = False) -> Quantized:
    """Quantize a program's linear layers and convolutions, with a scale for each output channel of a weight.

    Args:
        program: in float32.
        samples: real inputs, from which the ranges of activations are computed.
        keep: names or prefixes of layers that stay in float32.
        dynamic: compute the ranges of activations in each call; linear layers only.

    Raises:
        InvalidArgument: there is no layer that ``keep`` names.
        QuantizationError: nothing of the model was quantized, or it cannot be captured again.
        Unsupported: torchao is not installed.
    """
    module = exported.unguarded(program.exported)
    names = {node.name: name for name, node in graph.find(module.graph).items()}
    kept = graph.kept(module.graph, keep) | _unsafe(module)
    if dynamic:  # torchao would round the inputs of convolutions, but leave these in floats
        kept |= {node for node in module.graph.nodes if node.target in _LAYERS[1:]}
    _mark(module.graph, kept)
    converted = _convert(module, program, samples, dynamic)
    found = [node for node in converted.graph.nodes if node.target in _LAYERS and _is_quantized(node)]
    if not found:
        raise QuantizationError(
            "torchao found no layers in the model that it can quantize: linear layers, and convolutions of images"
            + (" (the latter not dynamically)" if dynamic else "")
        )
    operators = Counter(node.target.name().split("::")[-1] for node in found)
    made = graph.capture(converted, program)
    return Quantized(made, tuple(names.get(node.name, node.name) for node in found), dict(operators))


def pack(program: Program, blobs: BlobFolder) -> Packed:
    """Compile a quantized program for this machine's kind of processor and put it into ``blobs``.

    Raises:
        ExportError: there is no C++ compiler, or the model cannot be compiled.
    """
    return aoti.pack(program, blobs, freeze=True)


def _unsafe(module: fx.GraphModule) -> set[fx.Node]:
    """Return the convolutions of one channel: with frozen weights, PyTorch 2.13 compiles them incorrectly."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        weight = node.args[1] if node.target is aten.conv2d.default else None
        if isinstance(weight, fx.Node) and weight.op == "get_attr":
            groups = node.args[6] if len(node.args) > 6 else node.kwargs.get("groups", 1)
            if groups == 1 and operator.attrgetter(str(weight.target))(module).shape[1] == 1:
                found.add(node)
    return found


def _mark(found: fx.Graph, kept: set[fx.Node]) -> None:
    """Mark each call as coming from its own module, and kept calls as coming from none."""
    for node in found.nodes:
        if node.op == "call_function":
            source = node.target if node in kept else _SOURCES.get(node.target, node.target)
            node.meta["source_fn_stack"] = [(node.name, source)]


def _convert(module: fx.GraphModule, program: Program, samples: Samples, dynamic: bool) -> fx.GraphModule:
    with quiet():
        try:
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
            from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
        except ImportError as error:
            raise missing_package("torchao", "PT2E quantization", "quant") from error
        quantizer = x86.X86InductorQuantizer()
        default = x86.get_default_x86_inductor_quantization_config
        quantizer.set_global(default(is_dynamic=dynamic, reduce_range=devices.saturates_products()))
        with torch.no_grad():
            prepared = prepare_pt2e(module, quantizer)
            for batch in samples.batches():
                prepared(*graph.tensors(program.signature, batch))
            converted: fx.GraphModule = convert_pt2e(prepared)
    return converted


def _is_quantized(node: fx.Node) -> bool:
    data, weight = node.args[:2]
    return all(isinstance(item, fx.Node) and "dequantize" in str(item.target) for item in (data, weight))
