"""The intermediate results of a model as a module, an FX graph and an ONNX graph, for comparing them one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from ingot.errors import InvalidArgument
from ingot.export.program import Eager
from ingot.export.torch_internals import TorchDispatchMode, is_functorch_wrapped, pytree
from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.engines.pytorch.torch_arrays import from_torch
from ingot.tensors import Array, DType


def of_module(
    eager: Eager, inputs: Mapping[str, Array], operators: bool
) -> tuple[dict[str, Array], list[tuple[str, Array]]]:
    """Run a module and return its outputs and the results of its parts, each with the path of the submodule.

    Args:
        eager: the module.
        inputs: its inputs.
        operators: record PyTorch's operators as well as the submodules. A module with higher-order operators, such as
            ``torch.cond``, compiles them, so their operators cannot be recorded.

    Raises:
        ExportError: the module does not run on the inputs.
    """
    watch = _Watch()
    with watch.paths(eager.module), watch if operators else contextlib.nullcontext():
        return eager.run(inputs), watch.values


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[tuple[str, Array]] = []
        self._within = [""]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self._keep(outputs)
        return outputs

    def _keep(self, outputs: object) -> None:
        for output in pytree.tree_leaves(outputs):
            if (value := _copied(output)) is not None:
                self.values.append((self._within[-1], value))

    @contextlib.contextmanager
    def paths(self, module: nn.Module) -> Iterator[None]:
        """Track the submodule that runs, and record its outputs."""

        def enter(path: str) -> Any:
            return lambda *_: self._within.append(path)

        def leave(part: nn.Module, args: object, outputs: object) -> None:
            self._keep(outputs)
            self._within.pop()

        handles = []
        for path, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(enter(path)))
            handles.append(part.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def of_graph(graph: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> dict[str, Array]:
    """Run an FX graph and return the result of each node by its name."""
    recorder = _Recorder(graph)
    with torch.no_grad():
        recorder.run(*tensors)
    return recorder.values


class _Recorder(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.values: dict[str, Array] = {}

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if (value := _copied(result)) is not None:
            self.values[node.name] = value
        return result


def _copied(value: object) -> Array | None:
    """Return a copy of a tensor, which may be overwritten later; None for values that are not arrays."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if is_functorch_wrapped(value):  # one row within torch.vmap
        return None
    try:
        DType.parse(str(value.dtype).removeprefix("torch."))
    except InvalidArgument:
        return None
    return from_torch(value.detach().clone())


def of_onnx(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run an ONNX model in ONNX Runtime and return all results of its main graph by name.

    Every result becomes an output, so that the engine does not fuse operators.
    """
    shown = model.clone()
    given = set(shown.graph.outputs)
    shown.graph.outputs.extend(
        value for node in shown.graph for value in node.outputs if value not in given and _is_readable(value)
    )
    return run_onnx(shown, inputs)


def _is_readable(value: ir.Value) -> bool:
    if not value.name or not isinstance(value.type, ir.TensorType):
        return False
    try:
        DType.from_onnx(int(value.type.dtype))
    except InvalidArgument:
        return False
    return True


def run_onnx(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run an ONNX model in ONNX Runtime and return its outputs."""
    blobs = BlobFolder.scratch()
    descriptor, _ = onnx_graph.pack(model.clone(), blobs)
    with contextlib.closing(load_engine(EngineSpec(blobs.path(descriptor), device="cpu"))) as engine:
        return engine.run(inputs)
