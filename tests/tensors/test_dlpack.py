"""Tensors of other libraries, by the protocol: PyTorch's as they are, and those of a GPU by a stand-in."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from ingot.errors import InvalidArgument
from ingot.tensors import DType, dlpack

NUMBERS = [dtype for dtype in DType if dtype is not DType.BYTES]


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("old", [False, True], ids=["versioned", "unversioned"])
def test_a_tensor_of_each_datatype_is_a_view(dtype: DType, old: bool) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype.torch_name))
    array = dlpack.to_array("x", Unversioned(tensor) if old else tensor)
    assert array.dtype == dtype.numpy
    assert array.ctypes.data == tensor.data_ptr()
    assert array.astype(np.int64).tolist() == [[0, 1, 1], [1, 0, 1]]
    assert not array.flags.writeable


def test_views_have_the_order_of_their_tensor() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    for made in (tensor, tensor.permute(2, 0, 1), tensor[:, 1:, ::2], tensor[1], tensor[0, 0, 0], tensor[:0]):
        array = dlpack.to_array("x", made)
        assert array.tolist() == made.tolist()
        assert array.shape == tuple(made.shape)
        itemsize = array.itemsize
        strides = [itemsize * stride for stride in made.stride()]
        assert dlpack.is_contiguous(made.shape, strides, itemsize) == (made.is_contiguous() or not made.numel())
    bfloat = tensor.to(torch.bfloat16).permute(2, 0, 1)
    array = dlpack.to_array("x", bfloat)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype(np.float32).tolist() == bfloat.tolist()


@pytest.mark.matrix
def test_a_view_keeps_the_memory_of_its_tensor() -> None:
    tensor = torch.full((1000,), 7, dtype=torch.int64)
    gone: list[int] = []
    weakref.finalize(tensor, gone.append, 1)
    storage = tensor.untyped_storage()
    array = dlpack.to_array("x", tensor)[5:]
    del tensor
    gc.collect()
    assert storage.nbytes() == 8000
    assert array.tolist() == [7] * 995
    owners = array.base
    while isinstance(owners, np.ndarray):
        owners = owners.base
    assert isinstance(owners, dlpack.Exported)


class Unversioned:
    """A tensor of a library from before DLPack 1.0, whose ``__dlpack__`` knows no version."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, stream: Any = None) -> Any:
        return self._tensor.__dlpack__()


class Elsewhere:
    """A tensor of a device, which its library copies to the host if it can."""

    def __init__(self, kind: int, tensor: torch.Tensor | None):
        self._kind, self._tensor = kind, tensor
        self.asked: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 1

    def __dlpack__(self, **options: Any) -> Any:
        self.asked = options
        if self._tensor is None:
            raise BufferError("this library copies nothing")
        return self._tensor.clone().__dlpack__(max_version=options["max_version"])


def test_a_tensor_on_a_device_is_copied_by_its_library() -> None:
    tensor = Elsewhere(dlpack.CUDA, torch.tensor([1.5, 2.5]))
    assert dlpack.to_array("x", tensor).tolist() == [1.5, 2.5]
    assert tensor.asked == {"max_version": (1, 0), "dl_device": (1, 0), "copy": True}
    with pytest.raises(InvalidArgument, match=r"'x' on cuda:1 cannot be read: .*copies nothing; .* tensor\.cpu\(\)"):
        dlpack.to_array("x", Elsewhere(dlpack.CUDA, None))
    with pytest.raises(InvalidArgument, match="'x' on a device of kind 99:1 cannot be read"):
        dlpack.to_array("x", Elsewhere(99, None))


class Lies:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return "no capsule"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, requires_grad=True), "require gradient"),
        (torch.ones(2, dtype=torch.complex64), "elements of complex64 cannot be served; convert them to one of"),
        (torch.ones(2).to(torch.float8_e4m3fn), "cannot be served|float8"),
        (torch.ones(2).to_sparse(), "layout"),
        (Lies(), "no DLPack capsule"),
    ],
    ids=["gradient", "complex", "float8", "sparse", "no-capsule"],
)
def test_what_cannot_be_read_is_an_error_of_its_input(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"'x' on cpu cannot be read: .*({message})"):
        dlpack.to_array("x", value)


class Damaged:
    """A tensor whose capsule is described by fields that may be wrong."""

    def __init__(self, *shape: int, strides: tuple[int, ...] | None = None, **fields: Any):
        self._memory = (ctypes.c_float * 4)(1, 2, 3, 4)
        self._shape, self._strides = (ctypes.c_int64 * 65)(*shape), (ctypes.c_int64 * 65)(*strides or ())
        self._described = dlpack._Versioned(major=1)
        tensor = self._described.tensor
        tensor.data, tensor.device_type = ctypes.addressof(self._memory), dlpack.CPU
        tensor.code, tensor.bits, tensor.lanes, tensor.ndim = 2, 32, 1, len(shape)
        tensor.shape = ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64))
        if strides is not None:
            tensor.strides = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64))
        for name, value in fields.items():
            setattr(tensor, name, value)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        make = new(("PyCapsule_New", ctypes.pythonapi))
        return make(ctypes.addressof(self._described), b"dltensor_versioned", None)


def test_a_capsule_that_does_not_describe_a_tensor_is_an_error() -> None:
    assert dlpack.to_array("x", Damaged(2, 2)).tolist() == [[1, 2], [3, 4]]
    assert dlpack.to_array("x", Damaged(4, strides=(-1,), byte_offset=12)).tolist() == [4, 3, 2, 1]
    assert dlpack.to_array("x", Damaged(0, 3, data=None)).shape == (0, 3)
    for value, message in (
        (Damaged(2, shape=None), "no valid shape"),
        (Damaged(2, ndim=-1), "no valid shape"),
        (Damaged(2, ndim=1 << 30), "no valid shape"),
        (Damaged(-2, -2), "a negative size"),
        (Damaged(2, data=None), "no memory"),
        (Damaged(2, device_type=dlpack.CUDA), "another device"),
        (Damaged(2, lanes=4), "float32 in vectors of 4 cannot be served"),
        (Damaged(1 << 62, 8), "'x' cannot be read: ValueError: array is too big"),
        (Damaged(0, 1 << 62), "'x' cannot be read: ValueError: array is too big"),
        (Damaged(2, strides=(1 << 62,)), "'x' cannot be read: OverflowError"),
        (Damaged(2, byte_offset=(1 << 64) - 8), "'x' cannot be read: OverflowError"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            dlpack.to_array("x", value)


def test_arrays_of_numpy_are_not_exchanged() -> None:
    assert not dlpack.exports(np.ones(2))
    assert not dlpack.exports([1, 2])
    assert not dlpack.exports(None)
    assert dlpack.exports(torch.ones(2))


def test_arrays_become_tensors_without_a_copy() -> None:
    """As docs/guides/serve/python.md says of outputs."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert from_dlpack(array).data_ptr() == array.ctypes.data
    bfloat = array.astype(ml_dtypes.bfloat16)
    with pytest.raises((BufferError, RuntimeError, TypeError)):
        from_dlpack(bfloat)
    tensor = from_dlpack(bfloat.view(np.int16)).view(torch.bfloat16)
    assert tensor.data_ptr() == bfloat.ctypes.data
    assert tensor.tolist() == array.tolist()
