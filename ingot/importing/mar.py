"""TorchServe's model archives: ``.mar`` files (zip or tar), and the folders that they are made of.

Format: https://github.com/pytorch/serve/tree/master/model-archiver
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ingot.errors import InvalidArgument, NotFound, missing_package
from ingot.importing import formats, handlers
from ingot.importing.documents import documents
from ingot.importing.members import Members
from ingot.importing.record import Candidate, Consent, Imported, ModelFormat
from ingot.model_store.references import name_from

MANIFEST = "MAR-INF/MANIFEST.json"
_MAX_MANIFEST = 1 << 20
# What config files set that concerns the server, not the model.
_SETTING = re.compile(
    r"^(minWorkers|maxWorkers|batchSize|maxBatchDelay|responseTimeout|startupTimeout|deviceType|deviceIds|jobQueueSize"
    r"|parallelType|parallelLevel)\s*:",
    re.MULTILINE,
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, protected_namespaces=())


class _Model(_Record):
    model_name: str = Field(min_length=1, max_length=255)
    model_version: str | int | float | None = None
    serialized_file: str | None = None
    model_file: str | None = None
    handler: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None


class _Manifest(_Record):
    model: _Model


def candidate(members: Members, scratch: Path, consent: Consent) -> Candidate:
    """Return the model of an archive.

    Args:
        members: its files.
        scratch: an empty folder, for those that are needed.
        consent: what the user agreed to.

    Raises:
        InvalidArgument: it has no manifest of the format.
    """
    base = _base(members)
    found = _manifest(members, base).model
    version = None if found.model_version is None else str(found.model_version)
    reader = _Reader(members, base, found, scratch=scratch, consent=consent)
    return Candidate(str(members.path), name_from(found.model_name), version, reader.read, called=found.model_name)


def _base(members: Members) -> str:
    """Return the folder inside the archive: tar files have one of the model's name."""
    found = [name.removesuffix(MANIFEST) for name in members.sizes if f"/{name}".endswith(f"/{MANIFEST}")]
    shallow = [base for base in found if base.count("/") <= 1]
    if not shallow:
        raise InvalidArgument(
            f"{members.path} is no model archive of TorchServe: it has no {MANIFEST}; a saved model by itself goes "
            "through ingot export"
        )
    if len(found) > 1:
        raise InvalidArgument(f"{members.path} holds {len(found)} model archives; import one at a time")
    return shallow[0]


def _manifest(members: Members, base: str) -> _Manifest:
    raw = members.read(base + MANIFEST, _MAX_MANIFEST)
    try:
        return _Manifest.model_validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        where = f" at '{place}'" if place else ""
        raise InvalidArgument(
            f"{MANIFEST} of {members.path} is not valid{where}: {fault['msg']}; make the archive anew by "
            "torch-model-archiver"
        ) from error


class _Reader:
    """Reads one archive's model."""

    def __init__(self, members: Members, base: str, model: _Model, *, scratch: Path, consent: Consent):
        self._members = members
        self._base = base
        self._model = model
        self._folder = scratch / "model"
        self._consent = consent
        self._used = {base + MANIFEST}

    def read(self) -> Imported:
        """Take out what is needed; what is refused without that is refused first."""
        name = self._serialized()
        called = f"'{name.removeprefix(self._base)}' in {self._members.path}"
        notes, kind = self._agreed(name, called)
        # Called so whatever its own name is; an ONNX graph's data is beside it, under names that are looked at first.
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
        return Imported(
            called,
            kind,
            file,
            code=code,
            documents=carried,
            notes=(*notes, *self._remarks(), *left),
        )

    def _agreed(self, name: str, called: str) -> tuple[tuple[str, ...], ModelFormat]:
        """Return notes on the handler and the model's format; refuse all that the user did not agree to at once."""
        refusals: list[str] = []
        notes: tuple[str, ...] = ()
        kind = self._format(name, called)
        try:
            notes = handlers.note_on(self._model.handler, str(self._members.path), self._consent.without_handler)
        except InvalidArgument as error:
            refusals.append(str(error))
        try:
            self._need_code(kind, called)
        except InvalidArgument as error:
            refusals.append(str(error))
        if refusals and kind == "torchscript" and not self._consent.allow_code:  # else asked when it is one indeed
            refusals.append("TorchScript is a program, which --allow-code lets run")
        if refusals and kind in ("torchscript", "state_dict"):
            refusals.append("--input must say what the model takes, which the archive does not")
        if refusals:
            raise InvalidArgument("; moreover, ".join(refusals))
        return notes, kind

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
                "which Ingot does not run; export the model by ingot export package.module:attribute"
            )
        name = self._base + self._model.serialized_file
        if name not in self._members.sizes:
            raise InvalidArgument(
                f"{MANIFEST} of {self._members.path} names the model '{self._model.serialized_file[:200]}', which is "
                "not in it; make the archive anew by torch-model-archiver"
            )
        return name

    def _format(self, name: str, called: str) -> ModelFormat:
        suffix = PurePosixPath(name).suffix.lower()
        if suffix == ".onnx":
            return "onnx"
        if suffix == ".so":
            raise InvalidArgument(
                f"{called} is compiled: native code, without the model that it was made from; export that, by "
                "ingot export --to aoti"
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
            from ingot.importing import onnx_data
        except ModuleNotFoundError as error:
            raise missing_package(str(error.name), "importing models", "export") from error
        for place in onnx_data.locations(file, called):
            name = self._base + place
            if name not in self._members.sizes:
                raise NotFound(f"{called} has tensors in the file '{place[:200]}', which is not in the archive")
            if Path(self._folder / place) == file:
                raise InvalidArgument(f"{called} has tensors in a file called '{place}'; call that otherwise")
            self._members.copy(self._take(name), self._folder / place)

    def _take_code(self) -> Path:
        """Take out the Python files, whose names are how they import each other, and return the model's."""
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
                "or is no Python file that can be imported"
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
            notes.append(
                f"the packages of {model.requirements_file[:200]} are not installed: nothing of Ingot's needs them"
            )
        config = self._base + (model.config_file or "")
        if config in self._members.sizes:
            text = self._members.read(config, _MAX_MANIFEST).decode("utf-8", "replace")
            settings = ", ".join(dict.fromkeys(_SETTING.findall(text)))
            rest = f": {settings}" if settings else ""
            notes.append(f"settings in {model.config_file} are not taken over{rest}; see those of ingot serve")
        return tuple(notes)
