"""Triton's model repositories: folders ``model/config.pbtxt`` and ``model/1/model.onnx``.

Format: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/model_repository.html
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ingot.errors import InvalidArgument, NotFound
from ingot.importing import ensembles, formats
from ingot.importing.members import FolderMembers, documents, inside, reading
from ingot.importing.pbtxt import CONFIG, Config, read_config
from ingot.importing.record import Candidate, Imported, ModelFormat
from ingot.model_store import ServingDefaults
from ingot.model_store.references import name_from
from ingot.runtime.settings.labels import parse_labels

# Triton ignores other folders, those that begin with zero included.
_VERSION = re.compile(r"[1-9]\d{0,18}")
_MAX_FOLDERS = 10_000
_BACKENDS: dict[str, tuple[ModelFormat, str]] = {
    "onnxruntime": ("onnx", "model.onnx"),
    "onnxruntime_onnx": ("onnx", "model.onnx"),
    "pytorch": ("torchscript", "model.pt"),
    "pytorch_libtorch": ("torchscript", "model.pt"),
}
_SOURCE = "import or export its source model, as .onnx or with ingot export"
_OTHERS = {
    ensembles.BACKEND: "it combines other models; import those, and write a pipeline of them into ingot.toml",
    "python": "it is Python code, which Ingot does not run; export the model in it with ingot export",
    "tensorrt": _SOURCE,
    "tensorrt_plan": _SOURCE,
    "tensorflow": "convert it to ONNX with tf2onnx",
    "tensorflow_savedmodel": "convert it to ONNX with tf2onnx",
    "tensorflow_graphdef": "convert it to ONNX with tf2onnx",
}
# The backend of a folder whose configuration names none, by the first file that exists.
_BY_FILE = {
    "model.onnx": "onnxruntime",
    "model.pt": "pytorch",
    "model.plan": "tensorrt",
    "model.py": "python",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.xml": "openvino",
}


def candidates(path: Path) -> tuple[Candidate, ...]:
    """Return the versions of all models below a folder: a repository, a model's folder, or that of one version.

    Raises:
        InvalidArgument: the folder is none of these.
    """
    root = path.resolve()
    if _VERSION.fullmatch(root.name) and _is_model(root.parent):
        return (_candidate(root.parent, path.parent if path.name == root.name else root.parent, root.name),)
    if _is_model(root):
        return tuple(_versions(root, path, frozenset()))
    models = [item for item in _folders(path) if _is_model(item)]
    if not models:
        raise InvalidArgument(
            f"the folder {path} holds no model: neither MAR-INF/MANIFEST.json of TorchServe, nor {CONFIG} or a "
            "version folder such as 1/model.onnx of Triton, nor folders with these"
        )
    combined = frozenset(model.name for model in models if _ensemble(root, model) is not None)
    return tuple(itertools.chain.from_iterable(_versions(root, model, combined) for model in models))


def _is_model(path: Path) -> bool:
    return (path / CONFIG).is_file() or any(
        _VERSION.fullmatch(item.name) and any((item / name).exists() for name in _BY_FILE) for item in _folders(path)
    )


def _folders(path: Path) -> list[Path]:
    return sorted(item for item in itertools.islice(path.iterdir(), _MAX_FOLDERS) if item.is_dir())


def _ensemble(root: Path, model: Path) -> Config | None:
    """Return the configuration of an ensemble with steps; None for another model, or one that cannot be read."""
    try:
        with reading(model):
            config = read_config(root, model)
    except InvalidArgument:  # reported when the model is read
        return None
    return config if config.backend in ("", ensembles.BACKEND) and config.steps else None


def _versions(root: Path, model: Path, others: frozenset[str]) -> Iterator[Candidate]:
    if (config := _ensemble(root, model)) is not None:
        yield ensembles.candidate(model, config, others)
        return
    numbers = sorted((item.name for item in _folders(model) if _VERSION.fullmatch(item.name)), key=int)
    if not numbers:
        yield Candidate(str(model), name_from(model.resolve().name), None, partial(_nothing, root, model))
    for number in numbers:
        yield _candidate(root, model, number)


def _candidate(root: Path, model: Path, number: str) -> Candidate:
    name = model.resolve().name
    return Candidate(str(model / number), name_from(name), number, partial(_read, root, model, number), called=name)


def _nothing(root: Path, model: Path) -> Imported:
    config = read_config(root, model)
    if config.backend in _OTHERS:  # these may have none
        raise _refusal(config.backend, model)
    raise NotFound(f"{model} has no version folder, such as {model.name}/1")


def _read(root: Path, model: Path, number: str) -> Imported:
    with reading(model):
        return _version(root, model, number)


def _version(root: Path, model: Path, number: str) -> Imported:
    config = read_config(root, model)
    folder = inside(root, model / number)
    backend = config.backend or next((kind for name, kind in _BY_FILE.items() if (folder / name).exists()), "")
    if backend not in _BACKENDS:
        raise _refusal(backend, model)
    kind, usual = _BACKENDS[backend]
    file = _file(root, folder, config.filename or usual)
    called = str(file)
    if kind == "torchscript":
        formats.check_torchscript(file, called)
    carried, left = _documents(model, config)
    labels, more = _labels(model, config, carried)
    return Imported(
        called,
        kind,
        file,
        inputs=config.inputs,
        outputs=config.outputs,
        serving=ServingDefaults(labels=labels, states=dict(config.states)) if labels or config.states else None,
        documents=carried,
        notes=(*config.notes, *more, *left),
    )


def _labels(model: Path, config: Config, documents: Mapping[str, bytes]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of classes, and a note if the file with them is missing or cannot be read."""
    if not config.labels:
        return (), ()
    name = config.labels
    if name not in documents:
        return (), (f"the labels in {name[:100]} are not imported: there is no such text file next to {CONFIG}",)
    try:
        return parse_labels(documents[name], name, f"the labels in {model / name}"), ()
    except InvalidArgument as error:
        return (), (f"{error}; they are not imported",)


def _file(root: Path, folder: Path, name: str) -> Path:
    if "/" in name or name in ("", ".", ".."):
        raise InvalidArgument(
            f"{folder.parent / CONFIG} calls the model's file {name[:200]!r}, which is not a file name"
        )
    path = inside(root, folder / name)
    if path.is_dir():  # with its data files, always under this name
        path = inside(root, path / "model.onnx")
    if not path.is_file():
        raise NotFound(f"there is no file {path}, the model of that version")
    return path


def _refusal(backend: str, model: Path) -> InvalidArgument:
    if not backend:
        return InvalidArgument(
            f"the model {model} has neither a backend in {CONFIG} nor a model.onnx or model.pt; write backend: "
            '"onnxruntime" or "pytorch" and default_model_filename there'
        )
    why = _OTHERS.get(backend, _SOURCE)
    return InvalidArgument(
        f"the model {model} uses Triton's backend '{backend[:100]}', which cannot be imported: {why}"
    )


def _documents(model: Path, config: Config) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the small files next to the configuration, such as labels."""
    members = FolderMembers(model)
    return documents(members, [name for name in members.sizes if "/" not in name and name != CONFIG])
