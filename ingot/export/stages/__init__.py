"""The stages of an export: capture, rewrite the FX graph, lower, rewrite the ONNX graph, prove, pack.

Rewriting runs on both sides of lowering, and proves each change. :mod:`ingot.export.pipeline` wires the stages, which
share a :class:`~ingot.export.stages.context.Context`. Start reading at :mod:`ingot.export.stages.capture`.
"""
