"""The plans that a search starts with, and variations of them that may be more exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ingot.quant.config import with_embeddings
from ingot.quant.graph.source import Source
from ingot.quant.schemes.plan import EngineName, Plan, Scheme, fitting
from ingot.runtime import devices


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
        for plan in _static(source, fitting(source, "static"), ()):
            yield replace(plan, engine="openvino", name=f"{plan.name}, OpenVINO")


def _static(source: Source, static: Sequence[str], dynamic: Sequence[str]) -> Iterator[Plan]:
    """Yield plans with static ranges; layers without support for them get ranges per call."""
    if static:
        schemes: dict[str, Scheme] = {**dict.fromkeys(dynamic, "dynamic"), **dict.fromkeys(static, "static")}
        yield with_embeddings(source, Plan("static int8", schemes))
        yield with_embeddings(source, Plan("static int8, layers alone", schemes, between=False))


def _for_onnxruntime(source: Source, has_data: bool) -> Iterator[Plan]:
    static, dynamic = fitting(source, "static"), fitting(source, "dynamic")
    convolutions = [layer.name for layer in source.layers if layer.name in static and layer.operator == "Conv"]
    operators = {layer.name: layer.operator for layer in source.layers}
    alone = Plan("dynamic int8, products alone", {name: "dynamic" for name in dynamic if operators[name] != "LSTM"})
    whole = with_embeddings(source, Plan("dynamic int8", dict.fromkeys(dynamic, "dynamic")))
    if alone.schemes and alone.key != whole.key:
        yield alone
    elif dynamic:
        yield whole
    if has_data:
        yield from _static(source, static, dynamic)
    if dynamic:
        if alone.schemes and alone.key != whole.key:
            yield whole
        if has_data and convolutions:
            schemes: dict[str, Scheme] = dict.fromkeys(dynamic, "dynamic")
            schemes |= dict.fromkeys(convolutions, "static")
            yield with_embeddings(source, Plan("static convolutions, dynamic products", schemes))
    products = fitting(source, "int8", [layer.name for layer in source.layers if layer.operator != "Gather"])
    if products:
        yield with_embeddings(source, Plan("int8 weights", dict.fromkeys(products, "int8")))
        yield with_embeddings(source, Plan("int4 weights", dict.fromkeys(products, "int4"), block=32))


def refinements(plan: Plan) -> Iterator[Plan]:
    """Yield variations of a plan that may be more exact at little or no cost in speed."""
    if not plan.needs_data:
        return
    yield replace(plan, method="mse", name=f"{plan.name}, least squares")
    yield replace(plan, method="percentile", name=f"{plan.name}, percentile")
    yield replace(plan, correct=True, name=f"{plan.name}, corrected biases")
    yield replace(plan, migrate=0.8, name=f"{plan.name}, migrated outliers")
