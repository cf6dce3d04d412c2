"""The server's settings: from the command line, else from ``INGOT_...`` environment variables, else these defaults."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from ingot.errors import InvalidArgument
from ingot.report import units
from ingot.runtime import Limits, Settings
from ingot.runtime.settings import VariantChoice

# The settings that are times, in seconds.
TIMES = ("choice_time", "slo", "max_delay", "load_timeout", "drain_timeout", "ready_delay")
# Where a server listens. It is told as addresses, not as settings.
_ADDRESSES = ("host", "http_port", "grpc_port")
# Variables read in addition to the settings: store, secrets, other commands, tests.
_OTHER_VARIABLES = (
    "INGOT_HOME",
    "INGOT_KEY_PASSWORD",
    "INGOT_TOKEN_HOSTS",
    "INGOT_TRACEBACK",
    "INGOT_REQUIRE_TOOLS",
)
# What Kubernetes puts into every container where a service is called "ingot" or "ingot-...", but for settings' names.
_SERVICE = re.compile(r"INGOT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_PORT = re.compile(r"INGOT_(\w+_)?PORT")


def _seconds(value: Any) -> Any:
    """Return a time that is written, such as ``10s``, in seconds; numbers are seconds."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    found = units.seconds(text.removeprefix("-"))
    if found is None:
        raise PydanticCustomError("time", "no time; write it as {times}", {"times": units.TIMES})
    return -found if text.startswith("-") else found  # no setting takes a negative one: its limits will say so


def _unmistakable(value: Any) -> Any:
    """The same where a number alone may be meant as milliseconds: as a text it needs its unit, unless it is 0."""
    if isinstance(value, str) and value.strip()[-1:] in "0123456789." and _seconds(value):
        raise PydanticCustomError("time", "write a unit: {number}ms or {number}s", {"number": value.strip()})
    return _seconds(value)


_Seconds = Annotated[float, BeforeValidator(_seconds)]
_Unmistakable = Annotated[float | None, BeforeValidator(_unmistakable)]


class ServerConfig(BaseModel):
    """Every setting is an option of ``ingot serve``, and a variable: ``max_batch`` is ``INGOT_MAX_BATCH``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on. The default takes no connection from outside.")
    http_port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 takes any free one.")
    grpc_port: int = Field(8001, ge=0, le=65535, description="gRPC port; 0 takes any free one.")
    frontends: int = Field(
        0, ge=0, le=256, description="Processes that speak HTTP and gRPC, beside the one of the models; 0: that one."
    )
    tls_cert: Path | None = Field(
        None, description="PEM file of the certificate, and of those that vouch for it; both ports then speak TLS."
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's key, without a password.")
    grpc_server: Literal["fast", "grpcio"] = Field(
        "fast", description="Which gRPC server: fast, our own, or grpcio, gRPC's own, which takes far more CPU."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models run; auto is the GPU if there is one."
    )
    allow_code: bool = Field(
        False, description="Load variants of formats that can run code of whoever made the archive; ONNX cannot."
    )
    trust: Path | None = Field(
        None, description="A trust policy: only what it trusts is served, with every blob's digest checked at load."
    )
    ort_library: Path | None = Field(
        None, description="A library of custom operators that ONNX Runtime loads; native code, never from an archive."
    )
    variant_choice: VariantChoice = Field(
        "measured",
        description="Which variant of an archive is served if none is named, of those that run here: the fastest, or "
        "the archive's first.",
    )
    choice_time: _Seconds = Field(
        0.3, gt=0, le=60, description="How long each variant is timed at each batch size, if it must be."
    )
    derived_cache: bool = Field(
        True, description="Keep packed weights of large models beside the store, where processes share them."
    )
    instances: int = Field(1, ge=1, le=64, description="Engines for each model; they share out the CPU cores.")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads for one engine call; None: as many as are measured to pay."
    )
    max_batch: int = Field(64, ge=1, description="Most rows in one engine call.")
    slo: _Unmistakable = Field(
        None,
        gt=0,
        le=3600,
        description="Time in which requests without a timeout are to be answered; later ones are refused.",
    )
    max_delay: _Unmistakable = Field(
        None,
        ge=0,
        le=60,
        description="The longest that an idle engine waits for more rows; None: by the profile.",
    )
    max_queue: int = Field(4096, ge=1, description="Most requests that may wait for a model; more are refused.")
    max_queue_mb: int = Field(256, ge=1, description="Most MiB that waiting requests of a model may hold.")
    max_body_mb: int = Field(64, ge=1, le=2047, description="Largest request, in MiB.")
    max_bodies_mb: int = Field(1024, ge=1, description="Most MiB of request bodies held at once.")
    load_timeout: _Seconds = Field(
        300.0, ge=0, le=86400, description="How long a model may take to load and be tested; 0: as long as it takes."
    )
    drain_timeout: _Seconds = Field(
        30.0, ge=0, allow_inf_nan=False, description="How long requests in flight may take to finish at shutdown."
    )
    ready_delay: _Seconds = Field(
        0.0,
        ge=0,
        le=3600,
        description="How long the server goes on answering at shutdown, while its readiness says no.",
    )
    record: Path | None = Field(
        None, description="Folder to write some requests to, with their answers: users' data. Off by default."
    )
    record_share: float = Field(0.01, gt=0, le=1, description="Which share of the requests is recorded, at random.")
    record_limit: int = Field(1000, ge=1, description="Most requests of a model's version that are recorded.")
    record_limit_mb: int = Field(256, ge=1, description="Most MiB of a model's version that are recorded.")

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, options: bool = False) -> ServerConfig:
        """Return a configuration; what ``settings`` lacks comes from the environment or the defaults.

        Args:
            settings: by name.
            options: whether the user gave them as options of the command, so that messages call them that.

        Raises:
            InvalidArgument: a setting is unknown or has a wrong value; the message names it as the user wrote it.
        """

        def called(name: str) -> str:
            if name in given and name not in settings:
                return f"INGOT_{name.upper()}"
            return f"--{name.replace('_', '-')}" if options else name

        # Not by pydantic-settings: to import it took a twentieth of the time that a server takes to start.
        variables = {name: os.environ.get(f"INGOT_{name.upper()}") for name in cls.model_fields}
        _check_variables(cls)
        given = {name: text for name, text in variables.items() if text is not None}
        try:
            config = cls(**{**given, **settings})
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in fault["loc"])
            if name not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise InvalidArgument(f"there is no setting '{name}'; there are: {known}") from error
            value = {**given, **settings}[name]
            own = fault["type"] == "time"  # a text of ours, above
            unit = " seconds" if not own and name in TIMES and not isinstance(value, str) else ""
            problem = fault["msg"] if own else f"it must be {_takes(cls, name)}"
            raise InvalidArgument(f"{called(name)} is {value!r}{unit}: {problem}") from error
        if config.http_port and config.http_port == config.grpc_port:
            raise InvalidArgument(
                f"{called('http_port')} and {called('grpc_port')} are both {config.http_port}; each protocol needs a "
                "port of its own (0 takes any free one)"
            )
        return config

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, as JSON has them, without the addresses."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude=set(_ADDRESSES))

    @property
    def told(self) -> str:
        """The same in one line, as they can be given."""
        changed = self.changed.items()
        return ", ".join(f"{key} {units.written(value) if key in TIMES else value}" for key, value in changed)

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb << 20

    @property
    def runtime(self) -> Settings:
        """The settings that the runtime takes."""
        limits = Limits(self.max_batch, self.max_queue, self.max_queue_mb << 20, self.max_delay)
        return Settings(
            device=self.device,
            instances=self.instances,
            limits=limits,
            allow_code=self.allow_code,
            ort_library=self.ort_library,
            variant_choice=self.variant_choice,
            choice_time=self.choice_time,
            derived_cache=self.derived_cache,
            slo=self.slo,
            engine_threads=self.threads,
        )


def _check_variables(config: type[ServerConfig]) -> None:
    """Refuse a variable that nothing reads, since a misspelt setting would be passed over.

    Raises:
        InvalidArgument: names it, and the one that is most like it.
    """
    settings = [f"INGOT_{name.upper()}" for name in config.model_fields]
    for name in sorted(os.environ):
        if not name.startswith("INGOT_") or name in settings or name in _OTHER_VARIABLES or _of_kubernetes(name):
            continue
        known = [other.removeprefix("INGOT_") for other in (*settings, *_OTHER_VARIABLES)]
        near = difflib.get_close_matches(name.removeprefix("INGOT_"), known, 1)
        remedy = f"did you mean INGOT_{near[0]}?" if near else "docs/serving.md lists them"
        raise InvalidArgument(f"unknown environment variable {name}; {remedy}")


def _of_kubernetes(name: str) -> bool:
    """Tell whether Kubernetes set a variable. The name alone is not enough for a port: it may be misspelt."""
    if _SERVICE.fullmatch(name):
        return True
    host = f"{name.removesuffix('PORT')}SERVICE_HOST"
    return bool(_SERVICE_PORT.fullmatch(name)) and ("://" in os.environ[name] or host in os.environ)


def _takes(config: type[ServerConfig], name: str) -> str:
    """Return in words what a setting may be."""
    kind, *_ = [item for item in get_args(config.model_fields[name].annotation) if item is not type(None)] or [
        config.model_fields[name].annotation
    ]
    if isinstance(kind, str):
        *first, last = get_args(config.model_fields[name].annotation)
        return f"{', '.join(first)} or {last}"
    if kind is bool:
        return "true or false"
    if kind in (int, float) and name not in TIMES:
        what = "a whole number" if kind is int else "a number"
        return f"{what}, {bounds}" if (bounds := _bounds(config, name)) else what
    if kind in (int, float):
        return _bounds(config, name)
    return "a path" if kind is Path else "text"


def _bounds(config: type[ServerConfig], name: str) -> str:
    """Return the limits of a number or a time in words: ``over 0 and at most 1h``."""
    words = {"gt": "over", "ge": "at least", "le": "at most"}
    found = [
        (words[key], getattr(item, key))
        for item in config.model_fields[name].metadata
        for key in words
        if hasattr(item, key)
    ]
    written = units.written if name in TIMES else str
    return " and ".join(f"{word} {written(bound) if bound else 0}" for word, bound in found)
