"""ai.onnx.ml: tree ensembles, linear models and what scikit-learn's converters put around them."""

from __future__ import annotations

from ingot.bounds.abstract import FLOAT, INT64, STRING, Dims, Tensor, UnboundedError
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, refuse_empty
from ingot.bounds.poly import ONE


def classifier(op: Op) -> list[Tensor]:
    """Labels [rows] and scores [rows, classes]; a support vector machine's may have one for each pair of classes."""
    texts = max((_strings(op, name) for name in ("classlabels_strings", "classlabels_string")), default=0)
    numbers = max(len(op.integers(name)) for name in ("classlabels_int64s", "classlabels_ints"))
    classes = max(texts, numbers, 2)
    if op.node.operator == "SVMClassifier":
        classes = max(classes, classes * (classes - 1) // 2)
    rows = _rows(op)
    return [
        Tensor.of(STRING if texts else INT64, [rows]),
        Tensor.of(FLOAT, (rows, Interval.exactly(classes))),
    ]


def regressor(op: Op) -> list[Tensor]:
    targets = max(op.integer("n_targets", 1), op.integer("targets", 1), 1)
    return [Tensor.of(11 if op[0].kind == 11 else FLOAT, (_rows(op), Interval.exactly(targets)))]


def floats(op: Op) -> list[Tensor]:
    """Scaler, Normalizer, Imputer and similar operators: the shape is the input's."""
    keeps = op.node.operator in ("Binarizer", "Imputer") and op[0].kind in (INT64, 11)
    return [Tensor(op[0].kind if keeps else FLOAT, op[0].dims, op[0].count)]


def labels(op: Op) -> list[Tensor]:
    names = ("values_strings", "values_tensor", "classes_strings")
    kind = STRING if any(op.has(name) for name in names) else FLOAT if op.has("values_floats") else INT64
    if sum(name.startswith(("values_", "classes_")) for name in op.node.attributes) != 1:
        kind = 0
    return [Tensor(kind, op[0].dims, op[0].count)]


def one_hot_encoder(op: Op) -> list[Tensor]:
    kinds = max(len(op.integers("cats_int64s")), _strings(op, "cats_strings"))
    return [Tensor.of(FLOAT, (*op[0].shape(), Interval.exactly(kinds)))]


def extractor(op: Op) -> list[Tensor]:
    rows = op[0].shape()[:-1] or (Interval.exactly(1),)
    return [Tensor.of(op[0].kind, (*rows, Interval.up_to(op[1].count)))]


def feature_vectorizer(op: Op) -> list[Tensor]:
    widths = op.integers("inputdimensions")
    for tensor in op.given:
        refuse_empty(tensor.shape())
    return [Tensor.of(FLOAT, (_rows(op), Interval.exactly(sum(widths))))]


def _rows(op: Op) -> Interval:
    dims: Dims = op[0].shape()
    if not dims:
        raise UnboundedError("its input is a scalar")
    return dims[0] if len(dims) > 1 else Interval.up_to(dims[0].high.upper(ONE) if dims[0].high else ONE)


def _strings(op: Op, name: str) -> int:
    return op.node.attributes[name].strings if op.has(name) else 0
