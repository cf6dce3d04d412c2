"""Compiled kernels of operators: C++ or CUDA for PyTorch, and libraries of custom operators for ONNX Runtime.

Both are the user's native code. It does not go into an archive, and is loaded only on request.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot import foreign
from ingot.errors import InvalidArgument, NotFound, ParityError, Unsupported
from ingot.export.proof.parity import TOLERANCE
from ingot.export.torch_internals import OpOverload, has_kernel, pytree, schema
from ingot.runtime.engines.ort.ort_session import package
from ingot.runtime.engines.pytorch.torch_arrays import from_torch
from ingot.tensors import DType, arrays

_HEADER = "onnxruntime_c_api.h"
_OPTIONS = ("-std=c++20", "-O3", "-shared", "-fPIC")


def load(
    overload: OpOverload,
    body: Callable[..., Any],
    arguments: Mapping[str, Any],
    device: str,
    sources: Sequence[str | Path],
) -> None:
    """Compile sources that register a kernel of a PyTorch operator; see :meth:`ingot.export.rewrite.ops.Op.kernel`."""
    from torch.utils import cpp_extension  # slow to import, and rarely needed

    name = schema(overload).name
    if device not in ("cpu", "cuda"):
        raise InvalidArgument(f"there are kernels for 'cpu' and 'cuda', not for '{device}'")
    if device == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"a CUDA kernel of '{name}' needs a GPU, and PyTorch with CUDA")
    paths = [str(_existing(source)) for source in sources]
    try:
        # PyTorch caches the result (TORCH_EXTENSIONS_DIR), so it is compiled once.
        cpp_extension.load(name.replace("::", "_"), paths, extra_cflags=["-O3"], is_python_module=False)
    except (RuntimeError, OSError) as error:
        raise InvalidArgument(f"the kernel of '{name}' cannot be built: {_errors(str(error))}") from error
    if not has_kernel(name, device):
        namespace, _, short = name.partition("::")
        raise InvalidArgument(
            f"the sources register no kernel of '{name}' for '{device}'; they must hold: "
            f'TORCH_LIBRARY_IMPL({namespace}, {device.upper()}, m) {{ m.impl("{short}", &function); }}'
        )
    arguments = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(arguments))
    _compare(name, body(**arguments), overload(**arguments))


def _compare(name: str, expected: Any, actual: Any) -> None:
    for left, right in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        error = arrays.departure(from_torch(left), from_torch(right))
        if error > TOLERANCE.get(DType.of(from_torch(left)), 0.0):
            raise ParityError(
                f"the kernel of '{name}' deviates from the body on its example by {error:.1e} of the largest value; it "
                "stays registered in this process, so fix it and start a new process"
            )


def build_ort_library(sources: Sequence[str | Path], headers: str | Path, out: str | Path) -> Path:
    """Compile a library of custom operators, which replace the ONNX functions of the same names.

    Args:
        sources: C++ files; one defines ``RegisterCustomOps``.
        headers: a folder with the headers of ONNX Runtime, of the installed version or an older one.
        out: the library to write, such as ``libacme.so``.

    Returns:
        The library's absolute path, for ``SessionOptions.register_custom_ops_library``.

    Raises:
        NotFound: a source file or the headers are missing.
        Unsupported: the C++ compiler is missing.
        InvalidArgument: the sources do not compile, or the result is not a library of custom operators.
    """
    paths = [_existing(source) for source in sources]
    found = next(Path(headers).rglob(_HEADER), None)
    if found is None:
        raise NotFound(
            f"{headers} does not contain {_HEADER}. Wheels of ONNX Runtime lack it: download the archive "
            "onnxruntime-linux-x64-<version>.tgz of https://github.com/microsoft/onnxruntime/releases, and pass its "
            "folder 'include'"
        )
    library = Path(out).resolve()
    compiler = os.environ.get("CXX", "g++")
    options = [*_OPTIONS, f"-I{found.parent}", "-o", str(library)]
    try:
        subprocess.run([compiler, *options, *map(str, paths)], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Unsupported(f"the C++ compiler '{compiler}' is not installed; install it, or set CXX") from error
    except subprocess.CalledProcessError as error:
        raise InvalidArgument(f"{paths[0].name} does not compile: {_errors(error.stderr)}") from error
    ort = package()

    def failed(error: Exception) -> str:
        return f"ONNX Runtime cannot load {library.name}: {foreign.one_line(error, 300)}"

    with foreign.reported_as(InvalidArgument, failed):
        ort.SessionOptions().register_custom_ops_library(str(library))
    return library


def _existing(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if not path.is_file():
        raise NotFound(f"the source file {source} does not exist")
    return path


def _errors(text: str) -> str:
    """Return the error lines of a compiler's output, or the end of it."""
    lines = [line.strip() for line in text.splitlines() if "error: " in line]
    return " ".join(" | ".join(lines[:3]).split())[:600] or " ".join(text.split())[-600:]
