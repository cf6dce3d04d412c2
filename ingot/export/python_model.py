"""From a class in Python to an archive: its files, and the answers to its example, in the file and in the archive."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ingot.errors import ExportError, InvalidArgument, NotFound, SamplesFailed
from ingot.model_store import Archive, BlobFolder, Evidence, Golden, Provenance, Serving, add_variant
from ingot.model_store.blobs.blobs import CHUNK_BYTES
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import manifest
from ingot.model_store.format.evidence import ParityEvidence
from ingot.model_store.format.partition import PythonPlan
from ingot.model_store.places import python_class
from ingot.runtime.engines.engine import MORE, STREAM, Engine
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.python.requirements import hashes_of, pinned, wheels_of
from ingot.runtime.engines.spec import EngineSpec
from ingot.tensors import Array, Signature, arrays

_TOLERANCE = 1e-3
_FORMAT = "python"
# Answers of a stream that are compared.
_MOST_ANSWERS = 16


@dataclass(frozen=True)
class _Answers:
    """A model's signature, and its answers to its own example; empty without one.

    ``stream`` are the answers of code that yields several, the first ones; ``outputs`` are the first of them.
    """

    signature: Signature
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    stream: Sequence[Mapping[str, Array]] = ()


def export_class(
    source: str,
    *,
    name: str,
    requirements: Path | None = None,
    wheels: Path | None = None,
    include: Sequence[Path] = (),
    permissions: tuple[str, ...] = (),
    load_timeout: float | None = None,
) -> Archive:
    """Put a class in Python and its files into an archive, and prove that it answers its example alike there.

    The class runs twice, each time in an engine process as in a server: from its file, and from the archive.

    Args:
        source: ``model.py:Model``.
        name: of the archive.
        requirements: a file with lines ``name==version``, with hashes if they are to be checked.
        wheels: a folder with the wheels of the requirements, for the archive to hold; None for none.
        include: further files and folders, next to the class's file or below its folder.
        permissions: what the model may do besides computing; see
            :mod:`~ingot.permissions`.
        load_timeout: seconds in which the class must be loaded; None is unlimited.

    Raises:
        NotFound: there is no such file or class.
        InvalidArgument: the class or a file cannot be served.
        Unsupported: a required version of a package is not installed.
        ExportError: the archive answers the example differently, or lacks a file.
    """
    found = python_class(source)
    if found is None or not found[0].is_file():
        raise NotFound(f"there is no file {source if found is None else found[0]}")
    file, attribute = found[0].expanduser(), found[1]
    text = "" if requirements is None else _text(requirements)
    pins, hashes = pinned(text, str(requirements)), hashes_of(text, str(requirements))
    original = _answers(Path(f"{file}:{attribute}"), permissions, load_timeout)
    packed = _Packed.of(
        file,
        include,
        [] if wheels is None else wheels_of(pins, wheels),
        attribute=attribute,
        requirements=pins,
        hashes=hashes,
        permissions=permissions,
    )
    try:
        archived = packed.answers(load_timeout)
    except InvalidArgument as error:
        raise ExportError(
            f"the class can be loaded from {file}, but not from the archive: {error}; add the files that it reads with "
            "--include"
        ) from error
    return packed.archive(name, source, original, tuple(_proved(original, archived)))


def export_handler(
    file: Path,
    *,
    function: str,
    name: str,
    source: str,
    requirements: tuple[str, ...] = (),
    permissions: tuple[str, ...] = (),
    load_timeout: float | None = None,
) -> Archive:
    """Put a handler of TorchServe and the files of its folder into an archive, and load it there once.

    Args:
        file: the handler's, in the folder of the unpacked archive.
        function: its function, which it may lack.
        name: of the archive.
        source: the model archive that it comes from.
        requirements: versions of packages, each as ``name==version``.
        permissions: as for :func:`export_class`.
        load_timeout: seconds in which the handler must be loaded; None is unlimited.

    Raises:
        InvalidArgument: the handler cannot be loaded.
        Unsupported: a required version of a package is not installed.
    """
    packed = _Packed.of(
        file,
        [file.parent],
        interface="torchserve",
        attribute=function,
        requirements=requirements,
        permissions=permissions,
    )
    return packed.archive(name, source, packed.answers(load_timeout))


@dataclass(frozen=True)
class _Packed:
    """The blobs of a model: its files, and the plan, which an engine opens."""

    blobs: BlobFolder
    plan: PythonPlan
    graph: Descriptor
    files: Sequence[Descriptor]

    @classmethod
    def of(cls, file: Path, include: Sequence[Path], wheels: Sequence[Path] = (), **plan: object) -> _Packed:
        blobs = BlobFolder.scratch()
        files = _put(blobs, file, include)
        packages = {path.name: _blob(blobs, path, f"wheels/{path.name}") for path in wheels}
        found = {
            "file": file.name,
            "files": {path: blob.hex for path, blob in files.items()},
            "wheels": {name: blob.hex for name, blob in packages.items()},
            "python": platform.python_version(),
        }
        made = PythonPlan.model_validate({**found, **plan})
        graph = blobs.put(manifest.encode(made), manifest.WEIGHT, {manifest.FILEPATH: "python.json"})
        return cls(blobs, made, graph, [*files.values(), *packages.values()])

    def answers(self, load_timeout: float | None) -> _Answers:
        return _answers(self.blobs.path(self.graph), self.plan.permissions, load_timeout)

    def archive(self, name: str, source: str, original: _Answers, proof: tuple[ParityEvidence, ...] = ()) -> Archive:
        pins = dict(pin.split("==") for pin in self.plan.requirements)
        serving = Serving(
            name=name,
            variant=_FORMAT,
            format=_FORMAT,
            precision="none",
            signature=original.signature,
            requires={"python": self.plan.python, **pins},
            golden_tolerance=_TOLERANCE,
            provenance=Provenance.of(source, ("numpy",)),
            evidence=Evidence(parity=proof),
        )
        golden = [Golden({**original.inputs}, {**original.outputs})] if original.inputs else []
        distinct = {blob.digest: blob for blob in self.files}
        return Archive.create(self.blobs, [add_variant(self.blobs, serving, self.graph, [*distinct.values()], golden)])


def _answers(path: Path, permissions: tuple[str, ...], load_timeout: float | None) -> _Answers:
    isolation = Isolation(why="it is code", required=True, load_timeout=load_timeout)
    spec = EngineSpec(path, format=_FORMAT, device="cpu", allow_code=True, permissions=permissions)
    with contextlib.closing(load_engine(spec, isolation)) as engine:
        inputs = engine.example
        try:
            outputs = engine.run(inputs) if inputs else {}
            stream = _streamed(engine, inputs) if inputs and engine.capabilities.streams else ()
            return _Answers(engine.signature, inputs, outputs, stream)
        except SamplesFailed as error:
            raise InvalidArgument(f"the model's own example fails: {error}") from error


def _streamed(engine: Engine, inputs: Mapping[str, Array]) -> list[Mapping[str, Array]]:
    """Return the first answers of each sample, until none has more."""
    found: list[Mapping[str, Array]] = []
    numbers = np.arange(len(next(iter(inputs.values()))))
    while len(found) < _MOST_ANSWERS and (not found or found[-1][MORE].any()):
        handles = np.stack([numbers, np.full_like(numbers, len(found))], 1)
        found.append(engine.run({**inputs, STREAM: handles}))
    return found


def _proved(original: _Answers, archived: _Answers) -> Iterable[ParityEvidence]:
    """Yield the proof of each output.

    Raises:
        ExportError: the answers differ.
    """
    pairs = [*zip(original.stream, archived.stream, strict=False)] or [(original.outputs, archived.outputs)]
    for name in original.outputs:
        error = max(arrays.departure(first[name], second[name]) for first, second in pairs)
        if any(not np.array_equal(first.get(MORE, 0), second.get(MORE, 0)) for first, second in pairs):
            error = float("inf")
        if error > _TOLERANCE:
            raise ExportError(
                f"the archive does not answer the example as the file does: output '{name}' departs by {error:.2e}, "
                f"tolerance {_TOLERANCE:.0e}. Either the model is random, so that its example cannot be a golden, or "
                "it reads files that the archive lacks (--include)"
            )
        yield ParityEvidence(tensor=name, error=error, tolerance=_TOLERANCE, cases=len(pairs))


def _put(blobs: BlobFolder, file: Path, include: Sequence[Path]) -> dict[str, Descriptor]:
    """Put the files of a model into ``blobs``; return them by their paths in its folder."""
    folder, found = file.resolve().parent, {}
    for path in (file, *include):
        if not path.exists():
            raise NotFound(f"there is no file or folder {path}")
        if not path.resolve().is_relative_to(folder):
            raise InvalidArgument(f"{path} is outside of {folder}, the folder of {file.name}; move it there")
        for each in sorted(path.resolve().rglob("*")) if path.is_dir() else [path.resolve()]:
            name = each.relative_to(folder)
            if each.is_file() and "__pycache__" not in name.parts:
                found[name.as_posix()] = _blob(blobs, each, name.as_posix())
    return found


def _blob(blobs: BlobFolder, file: Path, name: str) -> Descriptor:
    with file.open("rb") as stream:
        return blobs.put(iter(partial(stream.read, CHUNK_BYTES), b""), manifest.WEIGHT, {manifest.FILEPATH: name})


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error
