"""``ingot.toml``: the settings of a server and its models in one file; see docs/guides/serve/configuration.md."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema, create_model
from pydantic.json_schema import GenerateJsonSchema

from ingot.config import toml_lines
from ingot.config.given import Given, nearest
from ingot.config.model import ModelConfig
from ingot.config.pipelines import Condition, Node, PipelineConfig, Table, problems
from ingot.config.server import ServerConfig
from ingot.config.setting import Setting
from ingot.errors import IngotError, InvalidArgument, InvalidConfig
from ingot.model_store.format import goldens
from ingot.model_store.places import is_file
from ingot.model_store.trust.keys import read_file

MAX_FILE_BYTES = 1 << 20
MAX_GOLDENS_BYTES = 64 << 20
# A prefix of sources on the command line, as ingot.serving.repository reads it.
_NAMED = re.compile(r"[A-Za-z0-9][\w.\-]*=.+", re.DOTALL)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$"


class _Untitled(GenerateJsonSchema):
    """Leaves out titles of keys, which would only repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The parsed file: the server's settings by name, the models and the pipelines."""

    server: Mapping[str, Given] = field(default_factory=dict)
    models: tuple[ModelConfig, ...] = ()
    pipelines: tuple[PipelineConfig, ...] = ()

    @classmethod
    def load(cls, path: Path) -> ConfigFile:
        """Read a file. Paths in it are relative to its folder.

        Raises:
            NotFound: there is no such file.
            InvalidConfig: it has faults.
            InvalidArgument: it cannot be read, or every user can write it.
        """
        path = Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for unknown users
        return cls.parse(read_file(path, trusted=True, limit=MAX_FILE_BYTES), path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> ConfigFile:
        """Parse the content of the file ``path``; raises as :meth:`load`."""
        try:
            text = content.decode()
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidConfig([f"{path} is not valid TOML: {error}"]) from error
        return cls.of(table, path, toml_lines.lines(text))

    @classmethod
    def of(
        cls, table: Mapping[str, Any], path: Path, lines: Mapping[toml_lines.KeyPath, int] = MappingProxyType({})
    ) -> ConfigFile:
        """Return the content of the file ``path`` with its lines.

        Raises:
            InvalidConfig: it has faults.
        """
        reader = _Reader(path, lines)
        try:
            parsed: Any = document().model_validate(table)
        except ValidationError as error:
            raise InvalidConfig(reader.problems(error)) from error
        models = tuple(reader.model(index, entry) for index, entry in enumerate(parsed.model))
        _check_different(models)
        reader.check_pipelines(parsed.pipelines, models)
        pipelines = tuple(reader.pipeline(name, table) for name, table in parsed.pipelines.items())
        return cls(server=reader.given(parsed.server, ("server",)), models=models, pipelines=pipelines)


@cache
def document() -> type[BaseModel]:
    """Return the model of the whole file, made of the settings."""
    known = ServerConfig.settings()
    # A model's own settings have the server's values as defaults.
    own = [dataclasses.replace(setting, default=None) for setting in known.values() if setting.per_model]
    about: dict[str, Any] = {
        "name": (
            Annotated[str, Field(pattern=_NAME, description="The name that clients use.")],
            Field(default_factory=str),
        ),
        "source": (
            Annotated[str, PlainValidator(_source), WithJsonSchema({"type": "string", "description": _SOURCE})],
            ...,
        ),
    }
    server: Any = create_model("Server", __base__=_Table, __doc__="The server's settings.", **_fields(known.values()))
    model: Any = create_model("Model", __base__=_Table, __doc__="A model to serve.", **about, **_fields(own))
    return create_model(
        "Configuration",
        __base__=_Table,
        __doc__="The configuration file of ingot serve.",
        server=(server, Field(default_factory=server)),
        model=(list[model], Field(default_factory=list, description="The models to serve.")),
        pipelines=(
            dict[Annotated[str, Field(pattern=_NAME)], Table],
            Field(default_factory=dict, description="Pipelines of these models by name."),
        ),
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **document().model_json_schema(schema_generator=_Untitled),
    }


def _fields(settings: Iterable[Setting]) -> dict[str, Any]:
    # With default factories, as a default would replace that of the setting's schema.
    return {
        setting.name: (
            Annotated[Any, PlainValidator(_typed(setting)), WithJsonSchema(setting.schema)],
            Field(default_factory=lambda: None),
        )
        for setting in settings
    }


def _typed(setting: Setting) -> Callable[[object], Any]:
    def read(value: object) -> Any:
        try:
            return setting.typed(value)
        except (ValueError, OverflowError, TypeError) as error:
            raise ValueError(setting.fault(value, error)) from error

    return read


_SOURCE = "A reference such as digits:1 or oci://host/digits:1, or an .ingot or .onnx file, relative to this file."


def _source(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"is {value!r}: it must be a reference such as digits:1, or a file")
    if _NAMED.fullmatch(value):
        name, _, source = value.partition("=")
        raise ValueError(f'is {value!r}: write name = "{name}" and source = "{source}"')
    return value


@dataclass(frozen=True)
class _Reader:
    """Turns what pydantic found in one file into settings and problems with their lines."""

    path: Path
    lines: Mapping[toml_lines.KeyPath, int]

    def given(self, table: BaseModel, at: toml_lines.KeyPath) -> dict[str, Given]:
        """Return the settings of a table."""
        known, found = ServerConfig.settings(), {}
        for name in sorted(table.model_fields_set & set(known)):
            place, value = self.place((*at, name)), getattr(table, name)
            found[name] = Given(self._relative(value), f"{place}: {name}", place)
        return found

    def model(self, index: int, entry: Any) -> ModelConfig:
        """Return one of the models."""
        at = ("model", index)
        source = entry.source
        if is_file(source) and "://" not in source:
            source = os.path.abspath(self._relative(Path(source)))  # noqa: PTH100 - "#variant" is not part of the path
        return ModelConfig(name=entry.name, source=source, given=self.given(entry, at), place=self.place(at))

    def pipeline(self, name: str, table: Table) -> PipelineConfig:
        """Return a pipeline with its goldens; raises InvalidConfig if their file does not exist, or has none."""
        content = b""
        if table.goldens:
            try:
                content = read_file(self._relative(Path(table.goldens)), limit=MAX_GOLDENS_BYTES)
                if not goldens.decode(content):
                    raise InvalidArgument(f"{table.goldens} has no recorded requests")
            except IngotError as error:
                place = self.place(("pipelines", name, "goldens"))
                raise InvalidConfig([f"{place}: pipeline '{name}': {error}"]) from error
        return PipelineConfig.of(name, table, content, self.place)

    def check_pipelines(self, pipelines: Mapping[str, Table], models: Sequence[ModelConfig]) -> None:
        """Check what can be checked of pipelines without their models.

        Raises:
            InvalidConfig: one has faults, or a model has its name.
        """
        found = [item for name, table in pipelines.items() for item in problems(name, table)]
        for model in models:
            if model.name in pipelines:
                text = f"'{model.name}' is also the name of the model of {model.place}; rename one of them"
                found.append((("pipelines", model.name), text))
        if found:
            texts = sorted((self._line(at), f"{self.place(at)}: pipeline '{at[1]}': {text}") for at, text in found)
            raise InvalidConfig([text for _, text in texts])

    def problems(self, error: ValidationError) -> list[str]:
        """Return the problems in the order of their lines."""
        found: list[Any] = error.errors(include_url=False)
        return [text for _, text in sorted((self._line(item["loc"]), self._problem(item)) for item in found)]

    def _problem(self, item: Mapping[str, Any]) -> str:
        loc = item["loc"]
        key, place = str(loc[-1]), self.place(loc)
        if loc[0] == "pipelines":
            return f"{place}: {_pipeline_problem(item)}"
        if item["type"] == "extra_forbidden":
            return f"{place}: {_unknown(key, loc)}"
        if item["type"] == "missing":
            return f'{place}: the model has no source; add one: source = "digits:1"'
        if loc == ("model",) or (loc[0] == "model" and len(loc) == 2):
            return f"{place}: write a model as a table with two brackets: [[model]]"
        if loc == ("server",):
            return f"{place}: write the server's settings as a table: [server]"
        if item["type"] == "value_error":
            return f"{place}: {key} {item['ctx']['error']}"
        return (
            f"{place}: {key} is {item['input']!r}: it must be letters, digits, '.', '_' and '-', from a letter or digit"
        )

    def _line(self, loc: toml_lines.KeyPath) -> int:
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def place(self, loc: Sequence[str | int]) -> str:
        """Return the file and the line of a path of keys."""
        return f"{self.path}:{self._line(tuple(loc))}"

    def _relative(self, value: Any) -> Any:
        """Return a path relative to the file's folder; other values as they are."""
        if not isinstance(value, Path):
            return value
        return self.path.parent / os.path.expanduser(value)  # noqa: PTH111 - as in ConfigFile.load


def _pipeline_problem(item: Mapping[str, Any]) -> str:
    """Describe a fault in the form of a pipeline; ``loc`` is ("pipelines", NAME, key or "nodes", NODE, key)."""
    loc = item["loc"]
    named = ".".join(map(str, loc[: 4 if len(loc) > 3 else 2]))
    tables = (Table, Node, Condition)[min(max(0, len(loc) - 3) // 2, 2)]
    if item["type"] == "extra_forbidden":
        near = nearest(str(loc[-1]), tables.model_fields)
        remedy = f"did you mean {near}?" if near else f"there are: {', '.join(tables.model_fields)}"
        return f"unknown key '{loc[-1]}' in [{named}]; {remedy}"
    if item["type"] == "missing":
        return f"[{named if len(loc) > 4 else '.'.join(map(str, loc[:-1]))}] has no {loc[-1]}; add it"
    return f"{'.'.join(map(str, loc[1:]))} is {item['input']!r}: {item['msg'].lower()}"


def _unknown(key: str, loc: toml_lines.KeyPath) -> str:
    """Describe an unknown key, with the one that may be meant."""
    settings = ServerConfig.settings()
    tables: Mapping[str, Collection[str]] = {
        "": ("server", "model", "pipelines"),
        "server": (*settings,),
        "model": ("name", "source", *(name for name, setting in settings.items() if setting.per_model)),
    }
    here = str(loc[0]) if len(loc) > 1 else ""
    what = f"unknown key '{key}' in [[model]]" if here == "model" else f"unknown key '{key}'"
    if key not in tables[here] and (meant := nearest(key, tables[here])):
        headers = {"server": "[server]", "model": "[[model]]", "pipelines": "[pipelines.NAME]"}
        return f"{what}; did you mean {meant if here else headers.get(meant, meant)}?"
    if meant := nearest(key, settings):
        return f"{what}; {meant} is a setting of the server: write it below [server]"
    return f"{what}; there are: {', '.join(tables[here])}"


def _check_different(models: Sequence[ModelConfig]) -> None:
    first: dict[str, ModelConfig] = {}
    for model in models:
        same = first.setdefault(model.address, model)
        if same is not model:
            raise InvalidConfig([f"{model.place}: {model.source} is already the model of {same.place}; give it a name"])
