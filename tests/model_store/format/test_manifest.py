"""The documents of an archive: parsing, refusals, and their schemas."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ingot.errors import InvalidArchive
from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import manifest
from tests.model_store.samples import archive, serving


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"format": "pickle"}, "format"),
        ({"variant": "../x"}, "variant"),
        ({"golden_tolerance": -1}, "golden_tolerance"),
        ({"signature": None}, "signature"),
        (
            {"signature": {"inputs": [{"name": "x", "dtype": "FP99", "shape": []}], "outputs": []}},
            "signature.inputs.0.dtype",
        ),
        (
            {"signature": {"inputs": [{"name": "x", "dtype": "FP32", "shape": [1.5]}], "outputs": []}},
            "signature.inputs.0.shape",
        ),
        ({"parents": ["../x"]}, "parents"),
    ],
)
def test_a_bad_serving_document(change: dict[str, object], where: str) -> None:
    raw = json.dumps({**serving().model_dump(mode="json"), **change}).encode()
    with pytest.raises(InvalidArchive, match=rf"serving\.json is not valid at '{where}"):
        manifest.decode(manifest.Serving, raw, "serving.json")


@pytest.mark.parametrize(
    ("padding", "says"),
    [
        ({"width": {"values": {"x": 0}}}, "'width' cannot be padded: it is not a dimension"),
        ({"batch": {"values": {"x": 0}}}, "'batch' cannot be padded: it is the batch"),
        ({"seq": {"values": {"x": 0, "scale": 0}}}, "a value for 'scale', which does not have it; these have it: x"),
        ({"seq": {"values": {"x": 0, "z": 0}}}, "a value for 'z', which is not an input; these have it: x"),
        ({"seq": {"values": {}}}, "needs one value for each input that has it: x"),
        ({"seq": {"values": {"x": 1e300}}}, "1e.300 cannot pad input 'x', which is float32"),
        ({"seq": {"values": {"x": 0}, "buckets": [0]}}, "bucket 0 of 'seq' is not one of its sizes"),
        ({"seq": {"values": {"x": 0}, "buckets": [64, 32]}}, "not in ascending order"),
    ],
)
def test_padding_that_does_not_fit_the_signature(padding: dict[str, object], says: str) -> None:
    shape = ["batch", "seq"]
    tensor = {"name": "x", "dtype": "FP32", "shape": shape}
    scale = {"name": "scale", "dtype": "FP32", "shape": ["batch"]}
    signature = {"inputs": [tensor, scale], "outputs": [{**tensor, "name": "y"}], "batch": "batch"}
    raw = json.dumps({**serving().model_dump(mode="json"), "signature": signature, "padding": padding}).encode()
    with pytest.raises(InvalidArchive, match=says):
        manifest.decode(manifest.Serving, raw, "serving.json")


def test_unknown_fields_of_the_same_version_are_ignored() -> None:
    raw = json.dumps({**serving().model_dump(mode="json"), "later": {"field": 1}}).encode()
    assert manifest.decode(manifest.Serving, raw, "serving.json") == serving()


def test_a_document_is_encoded_the_same_each_time() -> None:
    assert manifest.encode(serving()) == manifest.encode(serving())
    assert manifest.decode(manifest.Serving, manifest.encode(serving()), "x") == serving()


INTERVAL = {"value": 0.9, "low": 0.8, "high": 1.0}
METRIC = {"name": "top1", "before": INTERVAL, "after": INTERVAL, "drop": INTERVAL, "budget": 0.1, "rows": 5}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "../../x"}, "cannot name a model"),
        ({"name": "\x1b]0;pwned"}, "cannot name a model"),
        ({"features": ["states"]}, "newer Ingot, for: states"),
        ({"golden_tolerance": 1e30}, "golden_tolerance"),
        ({"signature": {"inputs": [], "outputs": [], "batch": "batch"}}, "batch dimension"),
        *(
            ({"evidence": {part: [{"rows": 1, "seconds": seconds}]}}, rf"evidence\.{part}\.0\.seconds")
            for part in ("latency", "baseline")
            for seconds in (0, 1e-320, 1e300, -1, math.nan, math.inf)
        ),
        ({"evidence": {"latency": [{"rows": -1, "seconds": 1}]}}, r"evidence\.latency\.0\.rows"),
        ({"evidence": {"agreement": [{"tensor": "y", "cosine": math.nan, "error": 0}]}}, "finite numbers"),
        ({"evidence": {"agreement": [{"tensor": "y", "cosine": 1, "error": 0, "sqnr": math.inf}]}}, "finite numbers"),
        ({"evidence": {"metric": METRIC | {"rows": -1}}}, r"evidence\.metric\.rows"),
        ({"evidence": {"metric": METRIC | {"budget": math.nan}}}, r"evidence\.metric\.budget"),
        ({"evidence": {"metric": METRIC | {"drop": INTERVAL | {"low": -1e300}}}}, r"evidence\.metric\.drop\.low"),
    ],
)
def test_a_serving_json_that_makes_no_sense(change: dict[str, Any], says: str) -> None:
    raw = json.dumps({**serving().model_dump(mode="json"), **change}).encode()
    with pytest.raises(InvalidArchive, match=says):
        manifest.decode(manifest.Serving, raw, "serving.json")


# Fields of https://github.com/modelpack/model-spec/blob/main/schema/config-schema.json, each object of which has
# additionalProperties: false.
MODEL_PACK = {
    "descriptor": {
        "createdAt", "authors", "family", "name", "docURL", "sourceURL", "datasetsURL", "version", "revision", "vendor",
        "licenses", "title", "description",
    },
    "config": {"architecture", "format", "paramSize", "precision", "quantization", "capabilities"},
    "modelfs": {"type", "diffIds"},
}  # fmt: skip


def test_the_configuration_conforms_to_the_schema_of_model_pack() -> None:
    for variant in archive().variants:
        config = json.loads(read(variant.blobs, variant.manifest.config))
        assert set(config) == set(MODEL_PACK)
        for part, allowed in MODEL_PACK.items():
            assert set(config[part]) <= allowed
        assert config["modelfs"]["type"] == "layers"
        assert config["modelfs"]["diffIds"] == [layer.digest for layer in variant.manifest.layers]
        assert config["descriptor"]["createdAt"] == "2026-01-02T03:04:05Z"
        assert config["config"].get("quantization") == ("static-int8" if variant.name == "int8" else None)
        assert variant.manifest.config.media_type == "application/vnd.cncf.model.config.v1+json"
        assert all(layer.annotations or layer.media_type == manifest.WEIGHT for layer in variant.manifest.layers)
