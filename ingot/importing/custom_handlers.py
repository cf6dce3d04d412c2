"""Handlers of TorchServe that run as they are: an archive is unpacked, or one error lists all of its problems."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from ingot.errors import ALLOW_CODE, InvalidArgument, Unsupported, missing_package
from ingot.foreign import one_line
from ingot.importing.mar_manifest import MarModel
from ingot.importing.members import Members
from ingot.importing.record import Consent, CustomHandler, Imported
from ingot.runtime.engines.python import requirements
from ingot.runtime.engines.python.torchserve.handler import CONFIG, batch_size
from ingot.runtime.engines.python.torchserve.ts.mlflow import FLAVOR, MODEL, is_pickled
from ingot.runtime.engines.python.torchserve.ts.sagemaker import SCRIPT
from ingot.runtime.engines.python.torchserve.ts.text_handler import VOCABULARY

DEFAULT = {
    "image_classifier": "ImageClassifier",
    "image_segmenter": "ImageSegmenter",
    "object_detector": "ObjectDetector",
    "text_classifier": "TextClassifier",
    "sagemaker": "SageMaker",
    "mlflow": "MLflow",
}
"""The classes of TorchServe's own handlers, SageMaker's and MLflow's, which an archive's file derives from."""
_NEEDED = {"text_classifier": VOCABULARY, "sagemaker": SCRIPT, "mlflow": MODEL}
_OTHERS = {SCRIPT: f"SageMaker's {SCRIPT}", MODEL: f"MLflow's {MODEL}, whose model is a pickle or code"}
# The packages of MLflow, which adds itself to the requirements of each model.
_MLFLOW = ("mlflow", "mlflow-skinny")
# The file of an archive without one, and its code, which derives from a default handler.
_FILE, _CODE = "default_handler.py", "from ts.torch_handler.{0} import {1}\n\n\nclass Default({1}):\n    pass\n"
_MAX_TEXT = 1 << 20
# Levels of YAML: PyYAML takes seconds for thousands.
_DEEPEST = 50
# Settings in a model's configuration, and the options of `ingot serve` that correspond to them.
_OPTIONS = {
    "minWorkers": "--instances {}",
    "responseTimeout": "--engine-timeout {}s",
    "startupTimeout": "--load-timeout {}s",
    "jobQueueSize": "--max-queue {}",
    "maxBatchDelay": "--max-delay {}ms",
}


def read(members: Members, base: str, model: MarModel, folder: Path, consent: Consent) -> Imported:
    """Unpack an archive with a custom handler, or one of :data:`DEFAULT`; its code does not run here.

    Args:
        members: the archive's members.
        base: the prefix of their names.
        model: the model that the archive's manifest describes.
        folder: a new folder, which the members are copied to.
        consent: the user's consent.

    Raises:
        InvalidArgument: a file or package is missing, versions are not stated, or there is no consent; the message
            lists all of these.
    """
    archive = HandlerArchive(members, base, model)
    if problems := [*_unconsented(archive, consent), *archive.problems()]:
        raise InvalidArgument("; also, ".join(problems))
    config = archive.config()
    for name in archive.names:
        members.copy(base + name, folder / name)
    if archive.default:
        (folder / archive.file).write_text(_CODE.format(archive.handler, archive.default))
    if config:
        (folder / CONFIG).parent.mkdir(exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(config))
    pins, _ = archive.requirements()
    return Imported(
        f"the handler '{archive.handler if archive.default else archive.file}' in {members.path}",
        "python",
        folder / archive.file,
        custom=CustomHandler(folder, archive.file, archive.function, pins, consent.permissions),
        notes=tuple(_notes(config)),
    )


def _unconsented(archive: HandlerArchive, consent: Consent) -> Iterator[str]:
    if not consent.allow_code:
        own = "TorchServe's handler" if archive.default else "its own handler,"
        own = _OTHERS.get(archive.needed, f"{own} '{archive.handler}'")
        files = f"{archive.needed}, a pickle, and " if archive.needed.endswith(".pt") else ""
        yield (
            f"{archive.path} has {own}: {files}Python code, which an engine process runs; "
            f"{ALLOW_CODE}; or import the model alone with --without-handler, so that clients do the handler's work"
        )


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    yield f"the handler gets at most {batch_size(config)} requests at once (batchSize)"
    if options := [option.format(config[key]) for key, option in _OPTIONS.items() if config.get(key) is not None]:
        yield f"the server's settings in the model's configuration are not imported; serve it with {' '.join(options)}"


def mapping(text: str, called: str) -> dict[str, Any]:
    """Return the mapping of a YAML document.

    Args:
        text: the document.
        called: its name, for messages.

    Raises:
        InvalidArgument: it is not a mapping of values that JSON has, or has aliases, which can fill the memory.
        Unsupported: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise missing_package("PyYAML", f"reading {called}", "deploy") from error
    try:
        _check_yaml(yaml.scan(text))
        found = json.loads(json.dumps(yaml.safe_load(text) or {}))
        if not isinstance(found, dict):
            raise ValueError("it is not a mapping")
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{called} is not valid: {one_line(error)}") from error
    return found


def _check_yaml(tokens: Iterable[Any]) -> None:
    """Refuse a document that takes much memory or time to load; scanning stops at the first fault.

    Raises:
        ValueError: there are aliases, or the values are nested deeply.
    """
    depth = 0
    for token in tokens:
        kind = type(token).__name__
        if kind == "AliasToken":
            raise ValueError("it has aliases")
        depth += kind.endswith(("SequenceStartToken", "MappingStartToken"))
        depth -= kind.endswith(("SequenceEndToken", "MappingEndToken", "BlockEndToken"))
        if depth > _DEEPEST:
            raise ValueError(f"its values are nested more than {_DEEPEST} deep")


class HandlerArchive:
    """The files of an archive; only text files are read.

    Attributes:
        path: the archive's path.
        names: the names of its files.
        handler: the handler as the manifest names it.
        default: the class of TorchServe's handler; empty for a custom one.
        needed: a further file that the handler needs, such as a vocabulary; empty without one.
        file: the name of the handler's file.
        function: the handler's function, ``handle`` unless the manifest names another.
    """

    def __init__(self, members: Members, base: str, model: MarModel):
        self.path = members.path
        self._members, self._base, self._model = members, base, model
        self.names = [name.removeprefix(base) for name in members.sizes if name.startswith(base)]
        self.handler = str(model.handler)[:200]
        self.default = DEFAULT.get(self.handler, "")
        self.needed = str(model.source_vocab or _NEEDED.get(self.handler, ""))[:200]
        named, _, function = self.handler.partition(":")
        self.file = _FILE if self.default else f"{PurePosixPath(named.removesuffix('.py')).name}.py"
        self.function = function if function.isidentifier() else "handle"

    def problems(self) -> Iterator[str]:
        """Yield missing files, versions and packages, with the remedies."""
        model = self._model
        files = (model.serialized_file, model.model_file, model.requirements_file, model.config_file)
        named = (*files, self.needed if self.default else self.file)
        for name in named:
            if name and name not in self.names:
                yield (
                    f"the manifest names '{name[:200]}', which is not in the archive; create it again with "
                    "torch-model-archiver"
                )
        if self.default and self.needed not in _OTHERS and not (model.serialized_file or model.model_file):
            yield f"the manifest names no model, which {self.handler} needs; create it again with --serialized-file"
        pins, unpinned = self.requirements()
        if unpinned:
            yield (
                f"{model.requirements_file} does not state a version of {', '.join(map(_advised, unpinned))}; unpack "
                "the archive, write name==version there, and import the folder"
            )
        try:
            requirements.check(pins)
        except Unsupported as error:
            yield str(error)
        stated = {pin.partition("==")[0].lower().replace("-", "_") for pin in pins}
        if missing := sorted(self._missing() - stated):
            yield f"the code imports packages that are not installed here: pip install {' '.join(missing)}"
        try:
            config = self.config()
        except InvalidArgument as error:
            yield str(error)
        else:
            if self.needed == MODEL and FLAVOR not in _flavors(config):
                yield f"its {MODEL} has no flavor {FLAVOR}; save the model with a flavor that has one"

    def requirements(self) -> tuple[tuple[str, ...], list[str]]:
        """Return the requirements that state a version, ``name==version``, and the lines that state none."""
        pins, unpinned = requirements.parsed(self.text(self._model.requirements_file))
        if self.needed == MODEL and is_pickled(_flavors(self.config())):
            pins = tuple(pin for pin in pins if pin.partition("==")[0] not in _MLFLOW)
        return pins, [*unpinned.values()]

    def config(self) -> dict[str, Any]:
        """Return the content of the configuration file.

        Raises:
            InvalidArgument: it is not YAML of values that JSON has, or has aliases, which can fill the memory.
        """
        if not (text := self.text(self._model.config_file)):
            return {}
        found = mapping(text, str(self._model.config_file))
        try:
            batch_size(found)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{self._model.config_file} is not valid: {one_line(error)}") from error
        return found

    def text(self, name: str | None) -> str:
        """Return the content of a text file; empty if there is none of this name."""
        if not name or name not in self.names:
            return ""
        return self._members.read(self._base + name, _MAX_TEXT).decode("utf-8", "replace")

    def _missing(self) -> set[str]:
        """Return the packages that the code imports and that are neither in the archive nor installed."""
        own = {PurePosixPath(name).parts[0].removesuffix(".py") for name in self.names}
        if self.needed in _OTHERS:  # its folder is in Python's path
            own |= {PurePosixPath(name).stem for name in self.names}
        known = {"ts", *own, *sys.stdlib_module_names}
        sizes = self._members.sizes
        code = (
            self.text(name) for name in self.names if name.endswith(".py") and sizes[self._base + name] <= _MAX_TEXT
        )
        return {name for text in code for name in _imports(text) if name not in known and not _is_installed(name)}


def _flavors(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get("flavors")
    return found if isinstance(found, dict) else {}


def _imports(text: str) -> Iterable[str]:
    """Return the packages that a module imports unconditionally; the code does not run."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # reported when the handler is loaded
        return
    for each in statements:
        if isinstance(each, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in each.names)
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            yield each.module.partition(".")[0]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module without a spec, which is imported already
        return True


def _advised(line: str) -> str:
    """Return a line in quotation marks, with the version that is installed here, if any."""
    name = re.match(r"[\w.-]*", line)
    try:
        version = metadata.version(name[0] if name is not None else "")
    except (metadata.PackageNotFoundError, ValueError):
        return f"'{line[:100]}'"
    return f"'{line[:100]}' ({version} is installed)"
