"""Custom operators: one definition is eager code, shapes, a rewrite rule and an ONNX function.

Start reading at :func:`ingot.export.rewrite.ops.definition.op`.
"""

from ingot.export.rewrite.ops.definition import Op, defined, op, rules
from ingot.export.rewrite.ops.kernels import build_ort_library

__all__ = ["Op", "build_ort_library", "defined", "op", "rules"]
