"""Small ONNX graphs for the tests of quantization, written in ONNX's own text form, and their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ingot.model_store import Archive, BlobFolder, Provenance, Serving, add_variant
from ingot.model_store.format import onnx_graph
from ingot.quant.data import ranges
from ingot.quant.data.ranges import Observation
from ingot.quant.data.samples import Samples
from ingot.quant.graph.source import Source
from ingot.quant.measure import audit
from ingot.quant.report.records import Audit
from ingot.quant.schemes import plan as plans
from ingot.quant.schemes import static
from ingot.quant.schemes.plan import Plan
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.tensors import Array


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, np.float32)


def graph(
    text: str,
    weights: Mapping[str, Array],
    *,
    opset: int = 20,
    inferred: bool = True,
    paths: Mapping[str, str] = MappingProxyType({}),
) -> ir.Model:
    """Return a model.

    Args:
        text: inputs, outputs and nodes, such as ``(float[batch,8] x) => (float[batch,4] y) { y = MatMul(x, w) }``.
        weights: the initializers.
        opset: ONNX's operator set.
        inferred: note the types of all values, as exporters do.
        paths: names of weights with dots, which the text form does not take, by those in the text.
    """
    body = onnx.parser.parse_graph(f"test {text}")
    body.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(
        body, opset_imports=imports, ir_version=min(10, helper.find_min_ir_version_for(imports, True))
    )
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto) if inferred else proto)
    for name, path in paths.items():
        model.graph.initializers[name].name = path
    return model


@contextlib.contextmanager
def loaded(model: ir.Model) -> Iterator[tuple[Engine, Path]]:
    """Yield the engine of a model, and its file. ``model`` stays as it is, but for large weights."""
    blobs = BlobFolder.scratch()
    path = blobs.path(onnx_graph.pack(model.clone(), blobs)[0])
    with contextlib.closing(load_engine(EngineSpec(path, device="cpu", threads=1))) as engine:
        yield engine, path


def answers(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Array]:
    with loaded(model) as (engine, _):
        return engine.run(inputs)


def audited(model: ir.Model) -> Audit:
    with loaded(model) as (_, path):
        return audit.audit(path)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def source_of(model: ir.Model) -> Source:
    """Return a model as a variant of an archive, as it is: nothing is rewritten as an export would."""
    blobs = BlobFolder.scratch()
    packed, weights = onnx_graph.pack(model.clone(), blobs)
    with contextlib.closing(load_engine(EngineSpec(blobs.path(packed), device="cpu", threads=1))) as engine:
        signature = engine.signature
    serving = Serving(
        name="test",
        variant="fp32",
        format="onnx",
        precision="fp32",
        signature=signature,
        provenance=Provenance.of("test", (), ()),
    )
    return Source(Archive.create(blobs, [add_variant(blobs, serving, packed, weights, ())]).variant())


def observed(source: Source, data: Mapping[str, Array] | Samples) -> dict[str, Observation]:
    """Return the activation ranges of layers on data, as a search records them."""
    samples = data if isinstance(data, Samples) else Samples.read(source.signature, data)
    model = source.model()
    names = set(plans.fitting(source, "static"))
    layers = [layer for name, layer in source.by_name(model).items() if name in names]
    return ranges.observe(model, static.watched(model, layers), static.contracted(layers), samples)


def quantized(model: ir.Model, plan: Plan, data: Mapping[str, Array]) -> ir.Model:
    """Return the model of a plan; without schemes, each layer gets static ones where possible."""
    source = source_of(model)
    if not plan.schemes:
        plan = plan.but(plans.fitting(source, "static"), "static")
    return plans.make(source, plan, observed(source, data) if plan.needs_data else {})


def sqnr(expected: Array, actual: Array) -> float:
    """Return signal to noise in dB."""
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    noise = float(np.square(left - right).sum())
    return 200.0 if noise == 0 else 10 * float(np.log10(np.square(left).sum() / noise))


def halves(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays with float16 in place of float32."""
    return {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in arrays.items()}
