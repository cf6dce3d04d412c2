"""TorchServe's model archives: ``.mar`` files (zip or tar) and unpacked folders.

Format: https://github.com/pytorch/serve/tree/master/model-archiver
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pydantic import ValidationError

from ingot.errors import InvalidArgument, NotFound, missing_package
from ingot.importing import custom_handlers, formats, handlers, other_servers, workflows
from ingot.importing.mar_manifest import MANIFEST, WORKFLOW, MarModel, Record, Workflow
from ingot.importing.members import Members, documents
from ingot.importing.recognition.form import Form
from ingot.importing.recognition.reader import recognized
from ingot.importing.record import Candidate, Consent, Imported, ModelFormat
from ingot.model_store import ServingDefaults
from ingot.model_store.references import name_from
from ingot.runtime.settings.labels import parse_labels

_MAX_MANIFEST = 1 << 20
_TOKENIZER, _MAX_TOKENIZER = "tokenizer.json", 64 << 20
_LABELS = handlers.LABELS
# Settings of the server in config files.
_SETTING = re.compile(
    r"^(minWorkers|maxWorkers|batchSize|maxBatchDelay|responseTimeout|startupTimeout|deviceType|deviceIds|jobQueueSize"
    r"|parallelType|parallelLevel)\s*:",
    re.MULTILINE,
)


_CLASSES = "and compute the softmax and the top classes of the response"
_PIXELS = "decode images, resize to 256, crop to 224, normalize with the mean and deviation of ImageNet"
_NONE = "base_handler"
_DEFAULT = {
    "image_classifier": f"{_PIXELS}, {_CLASSES}",
    "image_segmenter": f"{_PIXELS}, and take the largest class of each pixel",
    "object_detector": "decode images to numbers from 0 to 1, and drop the boxes of a score below 0.5",
    "text_classifier": f"split texts into tokens and look these up in the vocabulary, {_CLASSES}",
    _NONE: "send tensors, and expect tensors",
}


class _Manifest(Record):
    model: MarModel


class _WorkflowManifest(Record):
    workflow: Workflow


_M = TypeVar("_M", bound=Record)


def candidates(members: Members, scratch: Path, consent: Consent) -> tuple[Candidate, ...]:
    """Return the model of an archive, also of SageMaker or MLflow, or the functions and the pipeline of a workflow.

    Args:
        members: its files.
        scratch: an empty folder for unpacked files.
        consent: the user's consent.

    Raises:
        InvalidArgument: it has no valid manifest.
    """
    if other := other_servers.candidates(members, scratch, consent):
        return other
    base, manifest = _base(members)
    raw = members.read(base + manifest, _MAX_MANIFEST)
    if manifest == WORKFLOW:
        workflow = _manifest(_WorkflowManifest, members, raw).workflow
        return workflows.candidates(members, base, workflow, scratch, consent)
    found = _manifest(_Manifest, members, raw).model
    version = None if found.model_version is None else str(found.model_version)
    reader = _Reader(members, base, found, scratch=scratch, consent=consent)
    return (Candidate(str(members.path), name_from(found.model_name), version, reader.read, called=found.model_name),)


def _base(members: Members) -> tuple[str, str]:
    """Return the manifest's path in two parts: tar files have a folder with the model's name before it."""
    found = [
        (name.removesuffix(manifest), manifest)
        for name in members.sizes
        for manifest in (MANIFEST, WORKFLOW)
        if f"/{name}".endswith(f"/{manifest}")
    ]
    shallow = [each for each in found if each[0].count("/") <= 1]
    if not shallow:
        raise InvalidArgument(
            f"{members.path} is not a model archive of TorchServe: it has no {MANIFEST}; convert a plain saved model "
            "with ingot export"
        )
    if len(found) > 1:
        raise InvalidArgument(f"{members.path} holds {len(found)} model archives; import one at a time")
    return shallow[0]


def _manifest(kind: type[_M], members: Members, raw: bytes) -> _M:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        where = f" at '{place}'" if place else ""
        raise InvalidArgument(
            f"{MANIFEST} of {members.path} is not valid{where}: {fault['msg']}; create the archive again "
            "with torch-model-archiver"
        ) from error


class _Reader:
    """Reads one archive's model."""

    def __init__(self, members: Members, base: str, model: MarModel, *, scratch: Path, consent: Consent):
        self._members = members
        self._base = base
        self._model = model
        self._folder = scratch / "model"
        self._consent = consent
        self._used = {base + MANIFEST}

    def read(self) -> Imported:
        """Unpack the model. All checks that need no unpacking come first."""
        steps = self._model.handler in handlers.DECLARED and not self._consent.without_handler
        custom = not steps and not self._consent.without_handler and self._model.handler not in (None, "", _NONE)
        if custom and not self._consent.without_code:
            return self._handler()
        form, tokenizer, lines = self._recognized() if custom else (None, b"", ())
        name = self._serialized()
        called = f"'{name.removeprefix(self._base)}' in {self._members.path}"
        notes, kind = self._agreed(name, called)
        # Its own name is not used. The data files of an ONNX graph are next to it, under names that are checked first.
        suffix = {"onnx": "onnx", "pt2": "pt2"}.get(kind, "pt")
        file = self._members.copy(self._take(name), self._folder / f"model.{suffix}")
        if kind == "torchscript":
            formats.check_torchscript(file, called)
        elif kind == "pt2":
            formats.check_program(file, called)
        elif kind == "onnx":
            self._take_data(file, called)
        code = self._take_code() if kind == "state_dict" else None
        carried, left = self._documents()
        labels, more = _labels(carried)
        return Imported(
            called,
            kind,
            file,
            handler=str(self._model.handler) if steps or custom else "",
            form=form,
            tokenizer=tokenizer,
            instead=self._handler if (steps or custom) and self._consent.allow_code else None,
            inputs=(handlers.PIXELS,) if steps and kind != "onnx" else (),
            code=code,
            serving=ServingDefaults(labels=labels) if labels else None,
            documents=carried,
            notes=(*lines, *notes, *self._remarks(), *(() if steps or custom else more), *left),  # steps read the names
        )

    def _recognized(self) -> tuple[Form, bytes, tuple[str, ...]]:
        """Return the form of a custom handler, its tokenizer, and lines on its code, which does not run."""
        handler = custom_handlers.HandlerArchive(self._members, self._base, self._model)
        if handler.default:
            raise InvalidArgument(f"the handler {handler.handler} does not become steps; leave out --without-code")
        self._consent.need_code(f"the proof runs the handler {handler.file}, to compare its answers")
        form, lines = recognized(handler.text(handler.file), handler.file, handler.function)
        self._used |= {self._base + name for name in handler.names if name.endswith(".py")}
        return form, b"" if form.tokens is None else self._tokenizer(), lines

    def _tokenizer(self) -> bytes:
        named = [name for name in self._members.sizes if PurePosixPath(name).name == _TOKENIZER]
        if len(named) != 1:
            raise InvalidArgument(
                f"{self._members.path} has {len(named)} files {_TOKENIZER}, and the steps need one; add what "
                "tokenizer.save_pretrained(FOLDER) of a fast tokenizer writes"
            )
        return self._members.read(self._take(named[0]), _MAX_TOKENIZER)

    def _handler(self) -> Imported:
        folder = self._folder.with_name("handler")
        return custom_handlers.read(self._members, self._base, self._model, folder, self._consent)

    def _agreed(self, name: str, called: str) -> tuple[tuple[str, ...], ModelFormat]:
        """Return notes on the handler, and the model's format; one error lists all that needs consent."""
        kind = self._format(name, called)
        try:
            self._need_code(kind, called)
        except InvalidArgument as error:
            described = self._consent.described or self._model.handler in handlers.DECLARED
            if kind != "state_dict" or described:
                raise
            raise InvalidArgument(f"{error}; also, --input must describe its inputs") from error
        without = self._consent.without_handler
        return () if self._consent.without_code else _handler_note(self._model.handler, without=without), kind

    def _need_code(self, kind: ModelFormat, called: str) -> None:
        if kind == "pt2":
            self._consent.need_code(f"{called} is an exported program, and loading one can run code that it holds")
        elif kind == "state_dict":
            self._consent.need_code(
                f"{called} holds weights alone: the model is Python code, '{str(self._model.model_file)[:200]}'"
            )

    def _serialized(self) -> str:
        if not self._model.serialized_file:
            raise InvalidArgument(
                f"{self._members.path} holds no serialized model (serializedFile): its handler makes one in code, "
                "which Ingot does not run; export the model with ingot export package.module:attribute"
            )
        name = self._base + self._model.serialized_file
        if name not in self._members.sizes:
            raise InvalidArgument(
                f"{MANIFEST} of {self._members.path} names the model '{self._model.serialized_file[:200]}', which is "
                "not in it; create the archive again with torch-model-archiver"
            )
        return name

    def _format(self, name: str, called: str) -> ModelFormat:
        suffix = PurePosixPath(name).suffix.lower()
        if suffix == ".onnx":
            return "onnx"
        if suffix == ".so":
            raise InvalidArgument(
                f"{called} is compiled: native code without its source model; export that with ingot export --to aoti"
            )
        if suffix == ".pt2":
            return "pt2"
        if self._model.model_file:
            return "state_dict"
        return "torchscript"

    def _take(self, name: str) -> str:
        self._used.add(name)
        return name

    def _take_data(self, file: Path, called: str) -> None:
        try:
            places = _data_files(file, called)
        except ModuleNotFoundError as error:
            raise missing_package(str(error.name), "importing models", "export") from error
        for place in places:
            name = self._base + place
            if name not in self._members.sizes:
                raise NotFound(f"{called} has tensors in the file '{place[:200]}', which is not in the archive")
            if Path(self._folder / place) == file:
                raise InvalidArgument(f"{called} has tensors in a file called '{place}'; rename that file")
            self._members.copy(self._take(name), self._folder / place)

    def _take_code(self) -> Path:
        """Unpack the Python files, which import each other by name, and return the model's."""
        model_file = str(self._model.model_file)
        folder = self._folder / "code"
        for name in self._members.sizes:
            inner = name.removeprefix(self._base)
            if PurePosixPath(inner).suffix == ".py" and all(
                part.isidentifier() for part in PurePosixPath(inner).with_suffix("").parts
            ):
                self._members.copy(self._take(name), folder / inner)
        if not (folder / model_file).is_file():
            raise InvalidArgument(
                f"{MANIFEST} of {self._members.path} names the model's code '{model_file[:200]}', which is not in it, "
                "or is not an importable Python file"
            )
        return folder / model_file

    def _documents(self) -> tuple[dict[str, bytes], tuple[str, ...]]:
        rest = (name for name in self._members.sizes if name not in self._used)
        taken, notes = documents(self._members, rest)
        return {name.removeprefix(self._base): content for name, content in taken.items()}, notes

    def _remarks(self) -> tuple[str, ...]:
        model = self._model
        notes = []
        if model.requirements_file:
            notes.append(f"the packages of {model.requirements_file[:200]} are not installed: Ingot does not need them")
        config = self._base + (model.config_file or "")
        if config in self._members.sizes:
            text = self._members.read(config, _MAX_MANIFEST).decode("utf-8", "replace")
            settings = ", ".join(dict.fromkeys(_SETTING.findall(text)))
            rest = f": {settings}" if settings else ""
            notes.append(f"settings in {model.config_file} are not imported{rest}; see those of ingot serve")
        return tuple(notes)


def _labels(documents: Mapping[str, bytes]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of classes that default handlers use, and a note if they cannot be read."""
    if _LABELS not in documents:
        return (), ()
    try:
        return parse_labels(documents[_LABELS], _LABELS, f"the labels in {_LABELS}"), ()
    except InvalidArgument as error:
        return (), (f"{error}; they are not imported",)


def _handler_note(handler: str | None, *, without: bool) -> tuple[str, ...]:
    """Return a note on the pre- and postprocessing that clients must now do.

    Args:
        handler: the name of a default handler, a Python file, ``file:function``, or None.
        without: the handler is to be left out.
    """
    if not handler:
        return ()
    if handler in handlers.DECLARED and not without:
        return ()
    if handler in _DEFAULT:
        return (f"TorchServe's handler {handler} is not imported: clients must {_DEFAULT[handler]}",)
    return (f"the handler {handler[:200]} is not imported: clients must do its pre- and postprocessing",)


def _data_files(path: Path, called: str) -> tuple[str, ...]:
    """Return the names of the files with a graph's external data, which are not opened."""
    import onnx_ir as ir

    from ingot.model_store.format import onnx_graph

    model = onnx_graph.load(path, called)
    tensors = (
        value.const_value for graph in (model.graph, *model.graph.subgraphs()) for value in graph.initializers.values()
    )
    return tuple(dict.fromkeys(str(item.location) for item in tensors if isinstance(item, ir.ExternalTensor)))
