"""Compiled kernels. The compilers of PyTorch's extensions and of ONNX Runtime's libraries really run."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor

import ingot
from ingot.errors import InvalidArgument, NotFound, ParityError, Unsupported
from ingot.export.rewrite.ops import Op, build_ort_library
from tests.support import ROOT, RequireTool

SOURCE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

Tensor shift(Tensor x, double by) {
  Tensor result = torch::stable::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++) {
    result.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[i] + by BIAS;
  }
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(tests, CPU, m) { m.impl("NAME", TORCH_BOX(&shift)); }
"""


@pytest.fixture(autouse=True)
def tools(require_tool: RequireTool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_tool("g++")
    require_tool("ninja")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))


def shift(name: str) -> Op[..., Tensor]:
    @ingot.op(f"tests::{name}", example=(torch.arange(4.0),))
    def body(x: Tensor, by: float = 2.0) -> Tensor:
        return x + by

    return body


def source(folder: Path, name: str, bias: str = "") -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(SOURCE.replace("NAME", name).replace("BIAS", bias))
    return path


def test_a_kernel_replaces_the_body(tmp_path: Path) -> None:
    operator = shift("shifted")
    operator.kernel("cpu", source(tmp_path, "shifted"))
    operator.check()
    x = torch.randn(5)
    assert torch.allclose(operator(x, 3.0), x + 3)
    with pytest.raises(RuntimeError, match=r"dtype|type"):  # the kernel, not the body, which accepts any type
        operator(x.double(), 3.0)


@pytest.mark.matrix
def test_a_kernel_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match=r"the kernel of 'tests::biased' deviates from the body on its example by \d"):
        shift("biased").kernel("cpu", source(tmp_path, "biased", "+ 1"))


def test_sources_that_cannot_be_used(tmp_path: Path) -> None:
    operator = shift("unregistered")
    (tmp_path / "broken.cpp").write_text("int x = ;")
    (tmp_path / "empty.cpp").write_text("int x = 1;")
    with pytest.raises(
        InvalidArgument, match=r"'tests::unregistered' cannot be built: .*broken\.cpp:1:9: error: expected"
    ):
        operator.kernel("cpu", tmp_path / "broken.cpp")
    with pytest.raises(InvalidArgument, match=r"register no kernel .* TORCH_LIBRARY_IMPL\(tests, CPU, m\)"):
        operator.kernel("cpu", tmp_path / "empty.cpp")
    with pytest.raises(NotFound, match=r"the source file gone\.cpp"):
        operator.kernel("cpu", "gone.cpp")
    with pytest.raises(InvalidArgument, match="there are kernels for 'cpu' and 'cuda', not for 'tpu'"):
        operator.kernel("tpu", tmp_path / "empty.cpp")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_cuda_kernel_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="needs a GPU, and PyTorch with CUDA"):
        shift("graphical").kernel("cuda", tmp_path / "kernel.cu")


HEADER = """
struct OrtSessionOptions;
struct OrtApiBase;
struct OrtStatus;
"""
LIBRARY = """
#include <onnxruntime_c_api.h>
extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*) { return nullptr; }
"""


def test_a_library_for_onnx_runtime_is_built_and_loads(tmp_path: Path) -> None:
    """No wheel has the real headers; the calling convention of an empty library does not need them."""
    (tmp_path / "ort" / "include").mkdir(parents=True)
    (tmp_path / "ort" / "include" / "onnxruntime_c_api.h").write_text(HEADER)
    (tmp_path / "acme.cpp").write_text(LIBRARY)
    (tmp_path / "empty.cpp").write_text("int x = 1;")
    library = build_ort_library([tmp_path / "acme.cpp"], tmp_path / "ort", tmp_path / "libacme.so")
    onnxruntime.SessionOptions().register_custom_ops_library(str(library))
    with pytest.raises(InvalidArgument, match=r"cannot load libempty\.so: .*RegisterCustomOps"):
        build_ort_library([tmp_path / "empty.cpp"], tmp_path / "ort", tmp_path / "libempty.so")


def test_requirements_of_a_library_for_onnx_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ROOT / "examples" / "custom_op" / "ort_library.cpp"
    with pytest.raises(
        NotFound, match=r"does not contain onnxruntime_c_api\.h\. Wheels .* download the archive onnxruntime-linux"
    ):
        build_ort_library([example], tmp_path, tmp_path / "libacme.so")
    (tmp_path / "onnxruntime_c_api.h").write_text(HEADER)
    with pytest.raises(InvalidArgument, match=r"ort_library\.cpp does not compile: .*onnxruntime_cxx_api\.h"):
        build_ort_library([example], tmp_path, tmp_path / "libacme.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="the C\\+\\+ compiler 'no-such-compiler' is not installed"):
        build_ort_library([example], tmp_path, tmp_path / "libacme.so")
