"""Operators of classic machine learning."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import numpy_helper

from tests.bounds.generated import Call, Maker
from tests.bounds.recipes.recipe import ML, recipe


@recipe("TfIdfVectorizer")
def term_counts(m: Maker, operator: str) -> Call:
    texts = m.chance(0.5)
    attributes: dict[str, Any] = {
        "mode": "TF",
        "min_gram_length": 1,
        "max_gram_length": 2,
        "max_skip_count": m.pick(0, 1),
        "ngram_counts": [0, 2],
        "ngram_indexes": m.pick([0, 1, 2], [4, 0, 2]),
        **({"pool_strings": ["a", "b", "a", "B"]} if texts else {"pool_int64s": [1, 2, 5, 4]}),
    }
    x = m.tensor("t" if texts else "i", m.sizes(m.pick(1, 2)))
    return Call(operator, [x], attributes=attributes)


@recipe("StringNormalizer")
def normalizer(m: Maker, operator: str) -> Call:
    attributes = {"case_change_action": m.pick("LOWER", "UPPER", "NONE"), "stopwords": ["a", "B"], "locale": "C.UTF-8"}
    x = m.texts(m.pick([m.size()], [1, m.size()]))
    if m.chance(0.3) and x.array.size:
        x.array.reshape(-1)[-1:] = "Ⱥ"
        if x.bounds.text is not None and x.bounds.text.sent.terms:
            x.array.reshape(-1)[:] = ["Ⱥ" * 20, *[""] * (x.array.size - 1)]
        else:
            x.array.reshape(-1)[:] = ["Ⱥ" * (x.bounds.text.width // 2 if x.bounds.text else 0)] * x.array.size
    return Call(operator, [x], attributes=attributes)


LABELS = ["short", "a longer label, ß"]


@recipe("TreeEnsembleClassifier TreeEnsembleRegressor", ML)
def trees(m: Maker, operator: str) -> Call:
    attributes: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [1.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
    }
    kind, targets = ("class", m.pick(2, 3)) if operator == "TreeEnsembleClassifier" else ("target", m.pick(1, 3))
    attributes |= {
        f"{kind}_treeids": [0, 0],
        f"{kind}_nodeids": [1, 2],
        f"{kind}_ids": [0, targets - 1],
        f"{kind}_weights": [1.0, 2.0],
    }
    if kind == "target":
        attributes["n_targets"] = targets
    elif m.chance(0.5):
        attributes["classlabels_int64s"] = [1, 5, 7][:targets]
    else:
        attributes["classlabels_strings"] = [*LABELS, "x" * 30][:targets]
    return Call(
        operator,
        [m.tensor("f", [m.size(), 2])],
        2 if kind == "class" else 1,
        domain=ML,
        version=3,
        attributes=attributes,
    )


@recipe("TreeEnsemble", ML)
def tree_ensemble(m: Maker, operator: str) -> Call:
    attributes = {
        "n_targets": 2,
        "tree_roots": [0],
        "nodes_featureids": [0],
        "nodes_modes": numpy_helper.from_array(np.array([0], np.uint8)),
        "nodes_splits": numpy_helper.from_array(np.array([1.0], np.float32)),
        "nodes_truenodeids": [0],
        "nodes_trueleafs": [1],
        "nodes_falsenodeids": [1],
        "nodes_falseleafs": [1],
        "leaf_targetids": [0, 1],
        "leaf_weights": numpy_helper.from_array(np.array([1.0, 2.0], np.float32)),
    }
    return Call(operator, [m.tensor("f", [m.size(), 2])], domain=ML, version=5, attributes=attributes)


@recipe("LinearClassifier LinearRegressor", ML)
def linear(m: Maker, operator: str) -> Call:
    shape = m.pick([m.size(), 2], [2])
    if operator == "LinearRegressor":
        attributes: dict[str, Any] = {"coefficients": [1.0] * 4, "intercepts": [0.0, 1.0], "targets": 2}
        return Call(operator, [m.tensor("f", shape)], domain=ML, version=4, attributes=attributes)
    labels = {"classlabels_ints": [3, 4]} if m.chance(0.5) else {"classlabels_strings": LABELS}
    attributes = {"coefficients": [1.0] * 4, "intercepts": [0.0, 1.0], **labels}
    return Call(operator, [m.tensor("fi", shape)], 2, domain=ML, version=4, attributes=attributes)


@recipe("SVMClassifier SVMRegressor", ML)
def svm(m: Maker, operator: str) -> Call:
    attributes: dict[str, Any] = {
        "kernel_type": "LINEAR",
        "kernel_params": [0.1, 0.0, 3.0],
        "rho": [0.1],
        "support_vectors": [1.0, 2.0, 3.0, 4.0],
    }
    x = m.tensor("f", m.pick([m.size(), 2], [2]))
    if operator == "SVMRegressor":
        attributes |= {"coefficients": [1.0, 2.0], "n_supports": 2}
        return Call(operator, [x], domain=ML, version=4, attributes=attributes)
    labels = {"classlabels_ints": [3, 4]} if m.chance(0.5) else {"classlabels_strings": LABELS}
    attributes |= {"coefficients": [1.0, 2.0], "vectors_per_class": [1, 1], **labels}
    return Call(operator, [x], 2, domain=ML, version=4, attributes=attributes)


@recipe("Scaler Normalizer Imputer Binarizer", ML)
def floats(m: Maker, operator: str) -> Call:
    attributes: dict[str, dict[str, Any]] = {
        "Scaler": {"offset": [0.5], "scale": [2.0]},
        "Normalizer": {"norm": "MAX"},
        "Imputer": {"imputed_value_floats": [1.0], "replaced_value_float": 2.0},
        "Binarizer": {"threshold": 1.0},
    }
    return Call(
        operator,
        [m.tensor("fi" if operator in ("Scaler", "Normalizer") else "f", m.sizes(m.pick(1, 2)))],
        domain=ML,
        version=4,
        attributes=attributes[operator],
    )


@recipe("ZipMap", ML)
def zip_map(m: Maker, operator: str) -> Call:
    return Call(
        operator, [m.tensor("f", [m.size(), 2])], domain=ML, version=4, attributes={"classlabels_strings": LABELS}
    )


@recipe("LabelEncoder", ML)
def labels(m: Maker, operator: str) -> Call:
    x = m.tensor("t", m.shape(2)) if m.chance(0.4) else m.tensor("i", m.shape(2))
    keys: dict[str, Any] = {"keys_strings": ["a", "B"]} if x.bounds.kind == 8 else {"keys_int64s": [1, 2]}
    values: dict[str, Any] = m.pick(
        {"values_strings": LABELS, "default_string": "an even longer text for all others"},
        {"values_strings": LABELS},
        {"values_floats": [1.0, 2.0]},
        {"values_int64s": [7, 8]},
        {
            "values_tensor": numpy_helper.from_array(np.array(LABELS, object)),
            "default_tensor": numpy_helper.from_array(np.array(["x" * 50], object)),
        },
    )
    if x.bounds.kind == 8 and "values_strings" not in values:
        values.pop("default_string", None)
    return Call(operator, [x], domain=ML, version=4, attributes=keys | values)


@recipe("OneHotEncoder", ML)
def one_hot_encoder(m: Maker, operator: str) -> Call:
    if m.chance(0.5):
        return Call(
            operator, [m.tensor("t", m.shape(2))], domain=ML, version=4, attributes={"cats_strings": ["a", "B", "c"]}
        )
    return Call(operator, [m.tensor("if", m.shape(2))], domain=ML, version=4, attributes={"cats_int64s": [1, 2]})


@recipe("ArrayFeatureExtractor", ML)
def extractor(m: Maker, operator: str) -> Call:
    shape = m.pick([m.size(), 3], [3])
    return Call(operator, [m.tensor("fit", shape), m.ints(m.pick([0], [2, 1], [0, 0, 1, 1, 2]))], domain=ML)


@recipe("FeatureVectorizer", ML)
def vectorizer(m: Maker, operator: str) -> Call:
    rows, widths = m.size(), [m.pick(1, 2), m.pick(1, 3)]
    inputs = [m.tensor("f", [rows, width]) for width in widths]
    return Call(operator, inputs, domain=ML, version=4, attributes={"inputdimensions": widths})
