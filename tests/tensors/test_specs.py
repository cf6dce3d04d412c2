from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, Range, Signature, TensorSpec, check_inputs, parse_spec


@pytest.mark.parametrize(
    ("text", "spec", "ranges"),
    [
        (
            "image:float32[batch,3,224,224]",
            TensorSpec("image", DType.FP32, ("batch", 3, 224, 224)),
            {},
        ),
        ("scale:double[]", TensorSpec("scale", DType.FP64, ()), {}),
        ("scale:double[ ]", TensorSpec("scale", DType.FP64, ()), {}),
        ("x:FP16[1]", TensorSpec("x", DType.FP16, (1,)), {}),
        (" a.b/c-d:long[ N , 7 ] ", TensorSpec("a.b/c-d", DType.INT64, ("N", 7)), {}),
        (
            "ids:int64[batch=1..8,seq=2..512]",
            TensorSpec("ids", DType.INT64, ("batch", "seq")),
            {"batch": Range(1, 8), "seq": Range(2, 512)},
        ),
        ("ids:int32[seq=..512]", TensorSpec("ids", DType.INT32, ("seq",)), {"seq": Range(1, 512)}),
        ("ids:int32[seq=4..]", TensorSpec("ids", DType.INT32, ("seq",)), {"seq": Range(4, None)}),
        ("ids:int32[seq=0..3]", TensorSpec("ids", DType.INT32, ("seq",)), {"seq": Range(0, 3)}),
        ("x:int32[seq=..64:8]", TensorSpec("x", DType.INT32, ("seq",)), {"seq": Range(8, 64, 8)}),
        ("x:int32[seq=0..:8]", TensorSpec("x", DType.INT32, ("seq",)), {"seq": Range(0, None, 8)}),
        ("ids:int32[seq=7..7]", TensorSpec("ids", DType.INT32, ("seq",)), {"seq": Range(7, 7)}),
        ("mask:bool[seq=..9,seq]", TensorSpec("mask", DType.BOOL, ("seq", "seq")), {"seq": Range(1, 9)}),
        ("words:string[batch]", TensorSpec("words", DType.BYTES, ("batch",)), {}),
    ],
)
def test_a_good_description_is_parsed(text: str, spec: TensorSpec, ranges: dict[str, Range]) -> None:
    assert parse_spec(text) == (spec, ranges)


def test_a_spec_is_shown_as_it_is_written() -> None:
    text = "image:float32[batch,3,224,224]"
    assert str(parse_spec(text)[0]) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is not a tensor description"),
        ("image", "is not a tensor description"),
        ("image:float32", "is not a tensor description"),
        ("image[3]", "is not a tensor description"),
        (":float32[3]", "is not a tensor description"),
        ("3d:float32[3]", "is not a tensor description"),
        ("image:float32[3", "is not a tensor description"),
        ("image:float32[3]x", "is not a tensor description"),
        ("image:float33[3]", "'image:float33[3]' has an unknown data type 'float33'; known: bool"),
        ("image:complex64[3]", "unknown data type 'complex64'"),
        ("image:float32[-1,3]", "dimension '-1'"),
        ("image:float32[3,,4]", "dimension ''"),
        ("image:float32[3,]", "dimension ''"),
        ("image:float32[batch*2]", "dimension 'batch*2'"),
        ("image:float32[1.5]", "dimension '1.5'"),
        ("image:float32[seq=5]", "dimension 'seq=5'"),
        ("image:float32[seq=5...9]", "dimension 'seq=5...9'"),
        ("image:float32[seq=9..3]", "range of dimension 'seq=9..3' in 'image:float32[seq=9..3]' is empty"),
        (f"image:float32[{'9' * 5000}]", "dimension '999"),
        (f"image:float32[seq=1..{'9' * 5000}]", "dimension 'seq=1..999"),
    ],
)
def test_a_bad_description_names_what_is_wrong(text: str, part: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_spec(text)
    assert part in str(caught.value)


def test_a_range_includes_its_ends_and_may_be_open() -> None:
    closed, opened = Range(2, 4), Range(2)
    assert [size in closed for size in (1, 2, 4, 5)] == [False, True, True, False]
    assert [size in opened for size in (1, 2, 1 << 40)] == [False, True, True]


@pytest.mark.parametrize("dtype", list(DType))
def test_every_datatype_is_known_by_all_four_systems(dtype: DType) -> None:
    """The table is checked against the libraries themselves, not against a copy of it."""
    assert DType.parse(dtype.value) is dtype
    assert DType.parse(dtype.torch_name) is dtype
    assert DType.from_onnx(dtype.onnx) is dtype
    assert DType.of(np.empty((2, 3), dtype.numpy)) is dtype
    if dtype is DType.BYTES:
        assert dtype.onnx == onnx.TensorProto.STRING
        return
    assert dtype.numpy == onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx)
    of_torch = getattr(torch, dtype.torch_name)
    assert of_torch.itemsize == dtype.numpy.itemsize
    assert of_torch.is_floating_point == dtype.is_float
    assert dtype.is_integer == (dtype.value.startswith(("INT", "UINT")))


def test_arrays_of_text_and_of_other_byte_orders_have_a_datatype() -> None:
    assert DType.of(np.array(["a"])) is DType.BYTES
    assert DType.of(np.array([b"a"])) is DType.BYTES
    assert DType.of(np.array([1.0], dtype=">f4")) is DType.FP32
    assert DType.of(np.array([1], dtype=np.longlong)) is DType.INT64


@pytest.mark.parametrize(
    "array", [np.array([1j]), np.array(["2020-01-01"], "M8[D]"), np.ones(1, ml_dtypes.float8_e4m3)]
)
def test_an_array_that_no_protocol_carries_has_none(array: Array) -> None:
    with pytest.raises(InvalidArgument, match="cannot be tensors"):
        DType.of(array)


def test_onnx_types_that_are_not_served_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not served"):
        DType.from_onnx(onnx.TensorProto.FLOAT8E4M3FN)


SIGNATURE = Signature(
    inputs=(TensorSpec("a", DType.FP32, ("batch", 3)), TensorSpec("b", DType.INT64, ("batch", "seq"))),
    outputs=(TensorSpec("y", DType.FP32, ("batch", 1)),),
    batch="batch",
    ranges={"seq": Range(2, 4)},
)


def inputs(**changed: Array) -> dict[str, Array]:
    return {"a": np.zeros((2, 3), np.float32), "b": np.zeros((2, 4), np.int64), **changed}


def test_fitting_inputs_give_the_sizes_of_named_dimensions() -> None:
    assert check_inputs(SIGNATURE, inputs()) == {"batch": 2, "seq": 4}
    assert SIGNATURE.symbols == ("batch", "seq")
    assert SIGNATURE.batch_axes(SIGNATURE.inputs) == {"a": 0, "b": 0}
    assert SIGNATURE.inputs[1].wire_shape == [-1, -1]


def test_the_sides_of_a_square_must_agree() -> None:
    square = Signature((TensorSpec("mask", DType.BOOL, ("seq", "seq")),), ())
    assert check_inputs(square, {"mask": np.ones((3, 3), bool)}) == {"seq": 3}
    with pytest.raises(InvalidArgument, match="dimension 'seq' is 2 in input 'mask' but 3 elsewhere"):
        check_inputs(square, {"mask": np.ones((3, 2), bool)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": inputs()["a"]}, "input 'b' is missing; the model takes 'a', 'b'"),
        (inputs(c=np.zeros(1)), "unknown input 'c'; the model takes 'a', 'b'"),
        (inputs(a=np.zeros((2, 3))), "input 'a' has datatype FP64, the model takes FP32"),
        (inputs(a=np.array([["x"] * 3])), "input 'a' has datatype BYTES, the model takes FP32"),
        (inputs(a=np.zeros(3, np.float32)), r"input 'a' has 1 dimensions \[3\], the model takes 2: \[batch,3\]"),
        (inputs(a=np.zeros((), np.float32)), r"input 'a' has 0 dimensions \[\], the model takes 2"),
        (inputs(a=np.zeros((2, 4), np.float32)), "dimension 1 of input 'a' is 4, the model takes 3"),
        (inputs(b=np.zeros((2, 1), np.int64)), r"dimension 1 \('seq'\) of input 'b' is 1, the model takes 2\.\.4"),
        (inputs(b=np.zeros((2, 5), np.int64)), r"dimension 1 \('seq'\) of input 'b' is 5, the model takes 2\.\.4"),
        (
            inputs(a=np.zeros((0, 3), np.float32)),
            r"dimension 0 \('batch'\) of input 'a' is 0, the model takes 1 or more",
        ),
        (inputs(b=np.zeros((3, 4), np.int64)), "dimension 'batch' is 3 in input 'b' but 2 in another input"),
    ],
)
def test_each_way_to_be_wrong_has_its_message(given: dict[str, Array], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_inputs(SIGNATURE, given)


@pytest.mark.parametrize(
    ("text", "size", "says"),
    [
        ("x:float32[n]", 0, "dimension 0 ('n') of input 'x' is 0, the model takes 1 or more"),
        ("x:float32[n=2..4]", 5, "dimension 0 ('n') of input 'x' is 5, the model takes 2..4"),
        ("x:float32[n=..:8]", 9, "dimension 0 ('n') of input 'x' is 9, the model takes 8 or more, in multiples of 8"),
    ],
)
def test_a_size_out_of_range_is_reported_with_the_range(text: str, size: int, says: str) -> None:
    spec, ranges = parse_spec(text)
    with pytest.raises(InvalidArgument) as caught:
        check_inputs(Signature((spec,), (), ranges=ranges), {"x": np.zeros(size, np.float32)})
    assert str(caught.value) == says
