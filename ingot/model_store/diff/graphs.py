"""Reading the tensors and operators of a variant's ONNX graphs, also from an archive file.

This module needs onnx and onnx_ir, and is imported only for comparing graphs. The data of external tensors is read when
it is compared, from the archive's blobs and never by a path in the graph.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from ingot import foreign
from ingot.errors import InvalidArchive
from ingot.model_store.blobs.blobs import chunks
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.diff.records import TensorInfo
from ingot.model_store.diff.tensors import Graph, Tensor, about
from ingot.model_store.format.variant import Variant
from ingot.report.text import one_line


def read_graph(variant: Variant, where: str) -> Graph:
    """Read a variant's ONNX graph, or those of its parts; its format must be ``onnx`` or ``partitioned``.

    Args:
        variant: the variant.
        where: the archive's name in messages.

    Raises:
        InvalidArchive: a graph is missing, damaged or not ONNX, or a tensor's data is not where the graph says.
    """
    label = f"{where}: variant '{variant.name}'"
    reader = _Reader(variant, label)
    with about(label):
        for descriptor in variant.graphs():
            raw = variant.read_graph(descriptor)

            def message(error: Exception, digest: str = descriptor.digest) -> str:
                reason = one_line(" ".join(str(error).split()), 300)
                return f"graph {digest} is not an ONNX graph: {reason}"

            with foreign.reported_as(InvalidArchive, message, keep=InvalidArchive):
                reader.read(onnx.ModelProto.FromString(raw))
    return reader.found


class _Reader:
    """Collects the tensors and operators of one variant's graphs in ``found``."""

    def __init__(self, variant: Variant, label: str):
        self.found = Graph()
        self._label = label
        self._blobs = variant.blobs
        self._weights = {layer.hex: layer for layer in variant.weights}
        self._names: Counter[str] = Counter()

    def read(self, model: onnx.ModelProto) -> None:
        # Walk the messages directly: onnx_ir would log names from an invalid graph.
        self._graph(model.graph)
        for function in model.functions:
            self._nodes(function.node)

    def _graph(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self._add(tensor.name, tensor)
        self._nodes(graph.node)

    def _nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}::"
            self.found.operators[f"{domain}{node.op_type}"] += 1
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.HasField("t"):
                    self._add(node.output[0], attribute.t)
                for graph in (attribute.g, *attribute.graphs):
                    self._graph(graph)

    def _add(self, name: str, tensor: onnx.TensorProto) -> None:
        # Names in branches are local: another branch may use them too.
        self._names[name] += 1
        unique = name if self._names[name] == 1 else f"{name} ({self._names[name]})"
        self.found.tensors[unique] = self._tensor(unique, ir.serde.deserialize_tensor(tensor, ""))

    def _tensor(self, name: str, tensor: ir.TensorProtocol) -> Tensor:
        shape = tuple(int(size) for size in tensor.shape.numpy())
        if any(size < 0 for size in shape):
            raise InvalidArchive(f"the tensor '{one_line(name)}' has a negative dimension")
        if tensor.dtype == ir.DataType.STRING:
            return _strings(name, shape, tensor)
        bits, element = tensor.dtype.bitwidth, tensor.dtype.numpy()
        size = math.ceil(math.prod(shape) * bits / 8)
        info = TensorInfo(name=name, dtype=str(element), shape=shape, size=size)
        if isinstance(tensor, ir.ExternalTensor):
            layer = self._layer(info, tensor)
            return Tensor(info, layer.hex, lambda: self._content(layer), element=element, bits=bits)
        raw = tensor.tobytes()
        if len(raw) != size:
            raise InvalidArchive(f"the tensor '{one_line(name)}' holds {len(raw)} bytes; {info} has {size}")
        return Tensor(info, hashlib.sha256(raw).hexdigest(), lambda: (tensor.tobytes(),), element=element, bits=bits)

    def _content(self, layer: Descriptor) -> Iterator[bytes]:
        with about(self._label):
            yield from chunks(self._blobs, layer)

    def _layer(self, info: TensorInfo, tensor: ir.ExternalTensor) -> Descriptor:
        """Return the blob of a tensor outside its graph, which is all of that blob (see archive-format.md)."""
        location = str(tensor.location)
        layer = self._weights.get(location)
        if layer is None:
            raise InvalidArchive(
                f"the tensor '{one_line(info.name)}' is in '{one_line(location)}', which the manifest does not list"
            )
        if tensor.offset or tensor.length not in (None, info.size) or layer.size != info.size:
            raise InvalidArchive(
                f"the tensor '{one_line(info.name)}', {info} of {info.size} bytes, is not the whole of its blob "
                f"{layer.digest}, which has {layer.size} bytes"
            )
        return layer


def _strings(name: str, shape: tuple[int, ...], tensor: ir.TensorProtocol) -> Tensor:
    if not isinstance(tensor, ir.StringTensor):
        raise InvalidArchive(f"the tensor '{one_line(name)}' holds text outside its graph")
    items = list(tensor.string_data())
    if len(items) != math.prod(shape):
        raise InvalidArchive(f"the tensor '{one_line(name)}' holds {len(items)} texts, its shape is {list(shape)}")
    sha = hashlib.sha256()
    for item in items:  # with lengths, so that the same bytes divided otherwise have another digest
        sha.update(struct.pack("<Q", len(item)) + item)
    info = TensorInfo(name=name, dtype="string", shape=shape, size=sum(map(len, items)))
    return Tensor(info, sha.hexdigest(), lambda: items)
