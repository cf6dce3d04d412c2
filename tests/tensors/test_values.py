"""Declared ranges of values: how they are written, checked and generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ingot
from ingot.errors import ExportError, InvalidArgument
from ingot.export.proof.examples import Examples
from ingot.model_store.format import manifest
from ingot.quant.data.samples import Samples
from ingot.quant.data.synthetic import synthetic
from ingot.runtime.dispatch.signature_check import SignatureCheck
from ingot.runtime.profiling import profile
from ingot.tensors import Array, DType, Padding, Range, Signature, TensorSpec, ValueRange, check_inputs, parse_spec
from ingot.tensors.padding import declared
from tests.model_store import samples


def signature(*inputs: str, batch: str | None = None) -> Signature:
    parsed = [parse_spec(text) for text in inputs]
    specs = tuple(spec for spec, _ in parsed)
    ranges = {name: bounds for _, found in parsed for name, bounds in found.items()}
    return Signature(specs, (TensorSpec("y", DType.FP32, (batch,) if batch else ()),), batch, ranges)


@pytest.mark.parametrize(
    ("text", "values", "ranges"),
    [
        ("n:int64[]=0..4096", ValueRange(0, 4096), {}),
        ("n:int64[]=0..", ValueRange(0, None), {}),
        ("n:int8[]=..-3", ValueRange(None, -3), {}),
        ("n:uint64[]=0..18446744073709551615", ValueRange(0, 2**64 - 1), {}),
        ("ids:int64[batch,seq=1..512] = 0..30521", ValueRange(0, 30521), {"seq": Range(1, 512)}),
        ("x:float32[batch,3]=-1.5..2e3", ValueRange(-1.5, 2000.0), {}),
        ("x:bfloat16[]=0..1", ValueRange(0, 1), {}),
        ('"petal length (cm)":float32[batch]=0..10', ValueRange(0, 10), {}),
        ("a:0:int32[n]", None, {}),
    ],
)
def test_a_range_of_values_follows_the_dimensions(text: str, values: ValueRange | None, ranges: dict[str, Any]) -> None:
    spec, found = parse_spec(text)
    assert (spec.values, found) == (values, ranges)
    if not found:
        assert parse_spec(str(spec)) == (spec, {})
    assert Signature((spec,), ()).values == ({} if values is None else {spec.name: values})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("n:int64[]=5", "'5' is not a range of values; write low..high, such as 0..4096"),
        ("n:int64[]=", "'' is not a range of values"),
        ("n:int64[]=0...5", "'0...5' is not a range of values"),
        ("n:int64[]=a..b", "'a..b' is not a range of values"),
        ("n:int64[]=0..nan", "'0..nan' is not a range of values"),
        ("n:int64[]=..", "the range of values of input 'n' has no end; write at least one, such as 0.."),
        ("n:int64[]=5..1", "the range of values 5..1 of input 'n' is empty"),
        ("n:int64[]=0.5..1", "ends at 0.5, but the input is int64; write whole numbers"),
        ("m:uint8[]=0..256", "of input 'm' ends at 256, which uint8 cannot hold: its values are 0..255"),
        ("m:uint8[]=-1..5", "of input 'm' ends at -1, which uint8 cannot hold"),
        ("n:int64[]=0..9223372036854775808", "which int64 cannot hold"),
        ("h:float16[]=0..70000", "ends at 70000, which float16 cannot hold: its values are -65504.0..65504.0"),
        ("x:float32[]=0..1e39", "which float32 cannot hold"),
        ("b:bool[]=0..1", "input 'b' is bool, but only integer and floating-point inputs have a range of values"),
        ("t:string[]=0..1", "input 't' is text, but only integer and floating-point inputs"),
    ],
)
def test_a_malformed_range_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_spec(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("source", ["two\nlines", "\x1b[31m", "x" * 401])
def test_the_source_of_a_range_is_one_short_line(source: str) -> None:
    """It comes from archives, and messages repeat it."""
    with pytest.raises(InvalidArgument, match="source of the range of values of input 'n' is not one line of at most"):
        TensorSpec("n", DType.INT64, (), ValueRange(0, 9, source=source))


@pytest.mark.parametrize(
    ("text", "array", "says"),
    [
        ("n:int64[]=0..4096", np.array(4097), "input 'n' holds 4097, outside the range that the model takes: 0..4096"),
        ("n:int64[]=0..", np.array(-(2**63)), "input 'n' holds -9223372036854775808, outside"),
        ("n:int64[b,2]=0..9", np.array([[1, 2], [3, 10], [11, 4]]), "input 'n' holds 10 at index [1,1], outside"),
        ("n:uint64[b]=0..9", np.array([2**64 - 1], np.uint64), "input 'n' holds 18446744073709551615 at index [0]"),
        ("x:float32[b]=0..1", np.array([0.5, np.nan, 2], np.float32), "input 'x' holds nan at index [1], outside"),
        ("x:float32[b]=..1", np.array([-np.inf, np.inf], np.float32), "input 'x' holds inf at index [1], outside"),
        ("x:float16[b]=0..0.1", np.array([0.11], np.float16), "at index [0], outside the range that the model takes"),
    ],
)
def test_the_first_wrong_value_is_named(text: str, array: Array, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_inputs(signature(text), {text.partition(":")[0]: array})
    assert says in str(caught.value)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32, DType.FP64])
def test_the_ends_are_allowed_in_every_precision(dtype: DType) -> None:
    """0.1 as float32 is more than 0.1: a client that sends the declared end must not be refused."""
    spec = TensorSpec("x", dtype, ("n",), ValueRange(-0.1, 0.1))
    check_inputs(Signature((spec,), ()), {"x": np.array([-0.1, 0, 0.1]).astype(dtype.numpy)})
    with pytest.raises(InvalidArgument, match="outside"):
        check_inputs(Signature((spec,), ()), {"x": np.array([-0.1, 0, 0.12]).astype(dtype.numpy)})


def test_tensors_without_elements_fit() -> None:
    check_inputs(Signature((TensorSpec("x", DType.INT64, (0,), ValueRange(1, 2)),), ()), {"x": np.zeros(0, np.int64)})


def test_each_request_is_checked_not_only_the_first_of_its_shape() -> None:
    check = SignatureCheck(signature("n:int64[batch]=0..9", batch="batch"))
    assert check.find({"n": np.array([9, 0])}).samples == 2
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"input 'n' holds 10 at index \[1\]"):
            check.find({"n": np.array([0, 10])})
    assert check.find({"n": np.array([1, 2])}).samples == 2


INTEGERS = [dtype for dtype in DType if dtype.is_integer]
FLOATS = [dtype for dtype in DType if dtype.is_float]


@pytest.mark.matrix
@given(data=st.data(), dtype=st.sampled_from(INTEGERS), seed=st.integers(0, 5))
def test_generated_integers_are_within_the_range(data: st.DataObject, dtype: DType, seed: int) -> None:
    limits = np.iinfo(dtype.numpy)
    low, high = sorted(data.draw(st.tuples(*2 * [st.integers(int(limits.min), int(limits.max))])))
    ends = data.draw(st.sampled_from([(low, high), (low, None), (None, high)]))
    check_generated(TensorSpec("x", dtype, ("n", 3), ValueRange(*ends)), seed)


@pytest.mark.matrix
@given(data=st.data(), dtype=st.sampled_from(FLOATS), seed=st.integers(0, 5))
def test_generated_floats_are_within_the_range(data: st.DataObject, dtype: DType, seed: int) -> None:
    most = float(dtype.numpy.type(3e38 if dtype is not DType.FP16 else 6e4))
    low, high = sorted(data.draw(st.tuples(*2 * [st.floats(-most, most)])))
    ends = data.draw(st.sampled_from([(low, high), (low, None), (None, high)]))
    check_generated(TensorSpec("x", dtype, ("n", 3), ValueRange(*ends)), seed)


def check_generated(spec: TensorSpec, seed: int) -> None:
    """Check examples of an export, of warm-up and of calibration, and a user's example with variations."""
    known = Signature((spec,), (TensorSpec("y", DType.FP32, ("n",)),))
    for made in (
        Examples((spec,), {}).make({"n": 4}, seed),
        Examples((spec,), {}).signed().make({"n": 4}, seed),
        profile.zeros(known),
        next(iter(synthetic(known, 1, seed).batches(1))).inputs,
    ):
        check_inputs(known, {"x": made["x"]})
        assert made["x"].dtype == spec.dtype.numpy
    given = profile.zeros(known)
    check_inputs(known, Examples((spec,), {}, given).make({"n": 4}, seed))


def test_the_ends_of_the_range_are_among_the_examples_but_not_in_the_first() -> None:
    """The first is what the graph is captured with: a count of 0 may take another branch."""
    examples = Examples((TensorSpec("n", DType.INT64, (), ValueRange(0, 4096)),), {})
    found = [int(examples.make({}, seed)["n"]) for seed in range(3)]
    assert found[0] not in (0, 4096)
    assert found[1:] == [4096, 0]


def test_a_mask_is_generated_as_a_mask() -> None:
    mask = Examples((TensorSpec("mask", DType.INT64, ("batch", "seq"), ValueRange(0, 1)),), {}).make(
        {"batch": 3, "seq": 5}
    )
    assert mask["mask"][:, 0].all()


def test_an_example_outside_the_range_is_refused() -> None:
    spec = TensorSpec("n", DType.INT64, ("b",), ValueRange(0, 9))
    with pytest.raises(InvalidArgument, match=r"input 'n' holds 11 at index \[1\]"):
        Examples((spec,), {}, {"n": np.array([1, 11])})


def test_padding_outside_the_range_is_refused() -> None:
    known = signature("ids:int64[batch,seq]=1..9", batch="batch")
    with pytest.raises(InvalidArgument, match=r"0 cannot pad input 'ids', whose values are 1\.\.9"):
        declared({"seq": Padding()}, known)
    assert declared({"seq": Padding({"ids": 1})}, known)["seq"].values == {"ids": 1}


def test_an_archive_keeps_the_range() -> None:
    known = signature("n:int64[]=0..4096", "x:float32[batch]=-0.5..", "u:uint64[]=..18446744073709551615")
    serving = samples.serving(signature=known)
    raw = manifest.encode(serving)
    assert b'"values":{"low":0,"high":4096}' in raw
    assert b'"values":{"low":-0.5}' in raw
    assert manifest.decode(manifest.Serving, raw, "serving.json").signature == known


def test_archives_without_ranges_are_as_before() -> None:
    raw = manifest.encode(samples.serving())
    assert b"values" not in raw
    assert manifest.decode(manifest.Serving, raw, "serving.json").signature == samples.SIGNATURE


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"high":4096', b'"high":-1'), (b'"high":4096', b'"high":1e99'), (b'"high":4096', b'"high":"many"')],
)
def test_an_archive_with_a_damaged_range_is_refused(before: bytes, after: bytes) -> None:
    raw = manifest.encode(samples.serving(signature=signature("n:int64[]=0..4096")))
    with pytest.raises(InvalidArgument, match=r"serving\.json is not valid"):
        manifest.decode(manifest.Serving, raw.replace(before, after), "serving.json")


def test_calibration_data_outside_the_range_is_refused() -> None:
    known = signature("ids:int64[batch,2]=0..9", batch="batch")
    assert Samples.read(known, {"ids": np.array([[0, 9], [3, 4]])}).rows == 2
    with pytest.raises(InvalidArgument, match=r"calibration data.*input 'ids' holds 10 at index \[1,0\]"):
        Samples.read(known, {"ids": np.array([[0, 9], [10, 4]])})


@pytest.mark.matrix
@given(st.text("0123456789.-+eE_ \u0663naif", max_size=24))
def test_any_text_is_a_range_or_is_refused(text: str) -> None:
    for dtype in ("int8", "int64", "uint64", "float16", "float64", "bfloat16"):
        try:
            spec, _ = parse_spec(f"x:{dtype}[n]={text}")
        except InvalidArgument:
            continue
        assert spec.values is not None
        assert parse_spec(str(spec))[0] == spec
        check_generated(spec, 1)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(ids)
        return found.sum(1)


@pytest.mark.matrix
def test_a_module_keeps_its_ranges() -> None:
    spec = TensorSpec("ids", DType.INT64, ("batch", "seq"), ValueRange(2, 9))
    archive = ingot.export_model(Table(), inputs=[spec])
    assert archive.signature.inputs == (spec,)
    found = [golden.inputs["ids"] for golden in archive.variant().goldens()]
    assert found[0].min() >= 2
    assert found[1].max() == 9


@pytest.mark.parametrize("inputs", ["ids:int64[batch,seq]=0..10", "ids:int64[batch,seq]=-1..9"])
def test_a_range_beyond_what_a_module_accepts_is_found(inputs: str) -> None:
    with pytest.raises(
        ExportError, match=r"does not run on all values of ids:.*: IndexError: .*; declare a range that"
    ):
        ingot.export_model(Table(), inputs=inputs)
