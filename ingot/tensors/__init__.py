"""Arrays and their descriptions, for all packages: types, shapes, declared values, the raw form, DLPack and padding.

Start in specs.py, whose names are those of the package.
"""

from ingot.tensors.specs import (
    Array,
    Dim,
    DType,
    Range,
    Shape,
    Signature,
    TensorSpec,
    check_array,
    check_inputs,
    check_same,
    check_values,
    dim_name,
    foreign_format,
    parse_spec,
    symbols,
)

__all__ = [
    "Array",
    "DType",
    "Dim",
    "Range",
    "Shape",
    "Signature",
    "TensorSpec",
    "check_array",
    "check_inputs",
    "check_same",
    "check_values",
    "dim_name",
    "foreign_format",
    "parse_spec",
    "symbols",
]
