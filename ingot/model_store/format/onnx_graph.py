"""The form of ONNX models inside an archive: a small graph, and a blob for each large tensor.

Only this module and diff/graphs.py need the onnx_ir package; of servers, only those that run functions in OpenVINO.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import manifest

# Tensors of this many bytes and more become separate blobs, shared by every graph with the same values.
EXTERNAL_BYTES = 1 << 20


def load(path: Path, called: str | None = None) -> ir.Model:
    """Read an ``.onnx`` file with its external data.

    Args:
        path: the file.
        called: its name in messages; by default its path.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not an ONNX model.
    """
    if not path.is_file():
        raise NotFound(f"there is no file {called or path}")

    def unread(error: Exception) -> str:
        return f"{called or path} is not an ONNX model: {foreign.one_line(error, 300)}"

    with foreign.reported_as(InvalidArgument, unread):
        return ir.load(path)


def inline(model: ir.Model) -> None:
    """Replace calls of a model's functions, as custom operators are, by their bodies."""
    InlinePass()(model)


def externalize(model: ir.Model, blobs: BlobFolder, shared: BlobFolder | None = None) -> tuple[Descriptor, ...]:
    """Move each large tensor of a model into ``blobs``. Existing blobs are kept.

    Tensors in ``shared``, whose content is known to match their digests, are linked instead of copied.

    The external-data location of a tensor is its blob's hex digest, so ONNX Runtime maps it directly from the folder.
    """
    weights: dict[str, Descriptor] = {}
    for part in (model.graph, *model.graph.subgraphs()):
        # onnx_ir refuses files with several links: tensors that are computed from one come before it.
        for value in sorted(
            part.initializers.values(), key=lambda value: isinstance(value.const_value, ir.ExternalTensor)
        ):
            tensor = value.const_value
            if tensor is None or tensor.dtype == ir.DataType.STRING:
                continue
            if tensor.nbytes < EXTERNAL_BYTES:
                # Next to the source file, outside of the archive; or computed from a tensor there.
                if isinstance(tensor, ir.ExternalTensor | ir.LazyTensor):
                    value.const_value = ir.Tensor(tensor.numpy().copy(), name=tensor.name)
                continue
            blob = _stored(tensor, blobs, shared)
            weights[blob.digest] = blob
            value.const_value = ir.ExternalTensor(
                blob.hex,
                0,
                blob.size,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=tensor.name or value.name or "",
                base_dir=blobs.folder,
            )
    return tuple(weights.values())


def _stored(tensor: ir.TensorProtocol, blobs: BlobFolder, shared: BlobFolder | None) -> Descriptor:
    if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) == blobs.folder:
        digest = f"sha256:{tensor.location}"
        blob = Descriptor(media_type=manifest.WEIGHT, digest=digest, size=tensor.nbytes)
    elif isinstance(tensor, ir.ExternalTensor) and shared is not None and Path(tensor.base_dir) == shared.folder:
        blob = blobs.link(Path(tensor.path), manifest.WEIGHT)
    else:
        blob = blobs.put(tensor.tobytes(), manifest.WEIGHT)
    return blob.model_copy(update={"annotations": {manifest.FILEPATH: blob.hex}})


def pack(
    model: ir.Model, blobs: BlobFolder, shared: BlobFolder | None = None
) -> tuple[Descriptor, tuple[Descriptor, ...]]:
    """Store a model in ``blobs``: its graph, and each large tensor separately. ``model`` is modified.

    See :func:`externalize` for ``shared``.

    Returns:
        The descriptors of the graph and of the tensors.
    """
    weights = externalize(model, blobs, shared)
    _strip(model)
    graph = ir.serde.serialize_model(model).SerializeToString()
    return blobs.put(graph, manifest.WEIGHT, {manifest.FILEPATH: "model.onnx"}), weights


def _strip(model: ir.Model) -> None:
    """Remove debugging information of exporters, which names files of the user's machine and can be huge."""
    model.metadata_props.clear()
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in bodies:
        graph.metadata_props.clear()
        for node in graph.all_nodes():
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *graph.outputs):
            value.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
