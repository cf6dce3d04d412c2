"""The plans that a search starts with, and variations of them that may be more exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ingot.quant.config import DynamicInt8, StaticInt8, WeightInt4, WeightInt8, embeddings
from ingot.quant.graph.source import Source
from ingot.quant.schemes.plan import EngineName, Plan, fitting
from ingot.runtime.machine import devices


def families(source: Source, has_data: bool, engines: Sequence[EngineName] = ("onnxruntime",)) -> Iterator[Plan]:
    """Yield the plans that a search starts with, the cheapest to build first.

    Args:
        source: the model.
        has_data: whether ranges can be calibrated.
        engines: those that may run them. OpenVINO runs static ranges, and floats in bfloat16 if the processor has it:
            it has no kernels for ranges per call.
    """
    if "openvino" in engines and source.layers and devices.has_bf16():
        yield Plan("bf16, OpenVINO", {}, engine="openvino", compute="bf16")
    if "onnxruntime" in engines:
        yield from _for_onnxruntime(source, has_data)
    if "openvino" in engines and has_data:
        for plan in _static(source):
            yield replace(plan, engine="openvino", name=f"{plan.name}, OpenVINO")


def _static(source: Source) -> Iterator[Plan]:
    """Yield plans with static ranges."""
    whole = replace(StaticInt8().plan(source), name="static int8")
    if whole.needs_data:
        yield from float_embeddings(source, whole)
        yield whole
        yield replace(whole, between=False, name="static int8, layers alone")


def _for_onnxruntime(source: Source, has_data: bool) -> Iterator[Plan]:
    static, dynamic = fitting(source, "static"), fitting(source, "dynamic")
    operators = {layer.name: layer.operator for layer in source.layers}
    alone = Plan("dynamic int8, products alone", {name: "dynamic" for name in dynamic if operators[name] != "LSTM"})
    whole = replace(DynamicInt8().plan(source), name="dynamic int8")
    if alone.schemes and alone.key != whole.key:
        yield alone
    elif dynamic:
        yield whole
    if has_data:
        yield from _static(source)
        if static and (rest := set(dynamic).difference(static)):
            mixed = StaticInt8().plan(source).but(sorted(rest), "dynamic")
            yield replace(mixed, name="static int8, the rest dynamic")
    if dynamic:
        if alone.schemes and alone.key != whole.key:
            yield whole
        convolutions = [name for name in static if operators[name] == "Conv"]
        if has_data and convolutions:
            mixed = replace(whole, name="static convolutions, dynamic products")
            yield mixed.but(convolutions, "static")
    if fitting(source, "int8", [layer.name for layer in source.layers if layer.operator != "Gather"]):
        yield replace(WeightInt8().plan(source), name="int8 weights")
        yield replace(WeightInt4().plan(source), name="int4 weights")


def float_embeddings(source: Source, plan: Plan) -> Iterator[Plan]:
    """Yield a plan without its embeddings, if it has any: converting a few rows may cost more than it saves."""
    if set(embeddings(source)).intersection(plan.schemes):
        yield replace(plan.keep(embeddings(source)), name=f"{plan.name}, float embeddings")


def refinements(plan: Plan) -> Iterator[Plan]:
    """Yield variations of a plan that may be more exact at little or no cost in speed."""
    if not plan.needs_data:
        return
    yield replace(plan, method="mse", name=f"{plan.name}, least squares")
    yield replace(plan, method="percentile", name=f"{plan.name}, percentile")
    yield replace(plan, correct=True, name=f"{plan.name}, corrected biases")
    yield replace(plan, migrate=0.8, name=f"{plan.name}, migrated outliers")
