"""Arrays and their descriptions, for all packages: types, shapes, declared values, the raw form, DLPack and padding.

Start in specs.py, whose names are those of the package; arrays.py has the raw form.
"""

from ingot.tensors.padding import Padding
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
from ingot.tensors.values import ValueRange

__all__ = [
    "Array",
    "DType",
    "Dim",
    "Padding",
    "Range",
    "Shape",
    "Signature",
    "TensorSpec",
    "ValueRange",
    "check_array",
    "check_inputs",
    "check_same",
    "check_values",
    "dim_name",
    "foreign_format",
    "parse_spec",
    "symbols",
]
