"""Lowering to an AOTInductor package: native code for one device, one PyTorch version and one CPU architecture."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument
from ingot.export import torch_internals
from ingot.export.lower.packed import Packed, header, put, release
from ingot.export.lower.program import foreign_operators, inlined
from ingot.export.program import Program, quiet
from ingot.model_store import BlobFolder
from ingot.runtime.engines.pytorch.aoti import HEADER, read_metadata

_OPTIONS: dict[str, Any] = {
    # Otherwise the compiler uses all instructions of this processor, whatever the package's metadata says.
    "cpp.march": "",
    # Line tables contain paths of this machine, and double the size of the package.
    "aot_inductor.enable_line_tables": False,
    # The folder of precompiled headers is fixed when PyTorch is imported, and they would outlive the export.
    "aot_inductor.precompile_headers": False,
    # Whatever the environment says, the compiler neither folds weights nor changes their layout.
    "freezing": False,
}
# The operators that quantize and dequantize, which Inductor compiles without their Python source.
_QUANTIZATION = "quantized_decomposed::"
# The number of threads is set by the server, not fixed to that of the exporting machine.
_PARALLEL: dict[str, Any] = {"cpp.dynamic_threads": True}
_SERIAL: dict[str, Any] = {"cpp.threads": 1}


def lower(program: Program, path: Path, *, device: str = "cpu") -> Path:
    """Compile a captured program, which takes from seconds to minutes. Dynamic dimensions stay dynamic.

    Args:
        program: the program.
        path: the package to write; its name ends in ``.pt2``.
        device: the device that will run the package: ``cpu`` or ``cuda``, which this machine must have.

    Returns:
        The path of the package.

    Raises:
        InvalidArgument: the device is another one, or this machine does not have it.
        ExportError: there is no C++ compiler, or the model cannot be compiled.
    """
    program = inlined(program)
    _check(program, device)
    exported = program.exported
    if device != "cpu":
        exported = move_to_device_pass(copy.deepcopy(exported), device)
    options = {**_OPTIONS, "aot_inductor.metadata": {HEADER: header(program)}}
    with _scratch() as folder:
        package = folder / "model.pt2"
        # A compilation may take minutes: a parallel package that would probably be unusable is not compiled at all.
        if not _takes_indices(exported):
            _compile(exported, package, {**options, **_PARALLEL})
        if not package.exists() or _may_end_the_process(package):
            _compile(exported, package, {**options, **_SERIAL})
        _without_sources(package, path)
    return path


def pack(program: Program, blobs: BlobFolder, *, device: str = "cpu") -> Packed:
    """Compile a program and put the package into ``blobs``; see :func:`lower`."""
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        path = lower(program, Path(folder) / "model.pt2", device=device)
        metadata = read_metadata(path)
        graph = put(path, blobs)
    requires = {
        "engine": "aotinductor",
        "torch": release(),
        "device": device,
        "machine": metadata["AOTI_MACHINE"],
        "instructions": metadata["AOTI_CPU_ISA"].lower(),
    }
    if metadata["AOTI_COMPUTE_CAPABILITY"]:
        requires["compute_capability"] = metadata["AOTI_COMPUTE_CAPABILITY"]
    return Packed(graph, (), "aoti", requires)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a folder for all files of Inductor and of the C++ compiler, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        cache = str(Path(folder, "inductor"))
        # An interrupted compiler leaves its files in TMPDIR.
        folders = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        before = {name: os.environ.get(name) for name in folders}
        torch_internals.clear_inductor_caches()
        os.environ.update(folders)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            torch_internals.clear_inductor_caches()  # the caches refer to files in the folder


def _check(program: Program, device: str) -> None:
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise InvalidArgument(
            f"a model cannot be compiled for '{device}' here; use cpu, or cuda on a machine with a GPU"
        )
    custom = [name for name in foreign_operators(program) if not name.startswith(_QUANTIZATION)]
    if custom:
        raise ExportError(
            f"the operator {custom[0]} cannot be compiled into a package that runs without its source; "
            "export to ONNX with a translation of it, or in parts with --partition"
        )
    if not torch_internals.has_compiler():
        raise ExportError(
            "AOTInductor needs a C++ compiler, and found none: install g++ (on Debian, apt install g++), or set CXX "
            "to one"
        )


def _compile(exported: torch.export.ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    with foreign.reported_as(ExportError, "AOTInductor cannot compile the model"), quiet(), torch.no_grad():
        torch_internals.compile_package(exported, str(path), options)


def _takes_indices(exported: torch.export.ExportedProgram) -> bool:
    """Return whether an operator accepts a tensor of indices; :func:`_may_end_the_process` is then likely true."""
    targets = {node.target for node in exported.graph.nodes if isinstance(node.target, torch_internals.OpOverload)}
    arguments = (item for target in targets for item in torch_internals.schema(target).arguments)
    return any(item.name in ("index", "indices") and "Tensor" in str(item.type) for item in arguments)


def _may_end_the_process(package: Path) -> bool:
    """Return whether an index out of range, in an input, would end the process that runs the package.

    Inductor's kernels throw on such an index, and a C++ exception that leaves an OpenMP parallel region calls abort:
    https://github.com/pytorch/pytorch/issues/195402
    """
    with zipfile.ZipFile(package) as archive:
        sources = [archive.read(name) for name in archive.namelist() if name.endswith(".cpp")]
    return any(b"index out of bounds" in text and b"#pragma omp parallel" in text for text in sources)


def _without_sources(package: Path, path: Path) -> None:
    """Copy a package without its C++ sources, which are not used and contain paths of this machine."""
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.infolist():
            if entry.filename.endswith(".cpp"):
                continue
            copied = zipfile.ZipInfo(entry.filename)
            copied.file_size = entry.file_size
            with source.open(entry) as reader, target.open(copied, "w") as writer:
                shutil.copyfileobj(reader, writer)
