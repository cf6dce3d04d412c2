"""The server's settings: from the command line, else from ``INGOT_...`` environment variables, else these defaults.

A setting is stated once, as a field of :class:`ServerConfig`: the options of ``ingot serve`` and the table in
docs/serving.md are generated from it. The command line imports this module for ``--help``, so it imports little.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from ingot.errors import InvalidArgument
from ingot.report import units
from ingot.server.access.exposure import check_exposure
from ingot.server.settings import NotDurationError, Setting

if TYPE_CHECKING:
    from ingot.runtime import Settings

# The groups of the options in --help.
ADDRESSES = "Addresses"
ACCESS = "Access"
MODELS = "Models"
BATCHING = "Batching (the defaults measure the model)"
LIMITS = "Limits"
RECORDING = "Recording requests"
EXPERT = "For experts"

# Limits that grpcio does not support.
CLIENT_LIMITS = ("max_connections", "max_in_flight", "max_rate")
# Where a server listens. The command prints it as addresses, not as settings.
_ADDRESSES = ("host", "http_port", "grpc_port")
# Variables read in addition to the settings: store, secrets, other commands, tests.
_OTHER_VARIABLES = (
    "INGOT_HOME",
    "INGOT_API_KEY",
    "INGOT_KEY_PASSWORD",
    "INGOT_REDIRECT_HOSTS",
    "INGOT_TOKEN_HOSTS",
    "INGOT_TRACEBACK",
    "INGOT_REQUIRE_TOOLS",
)
# What Kubernetes puts into every container where a service is called "ingot" or "ingot-...", but for settings' names.
_SERVICE = re.compile(r"INGOT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_PORT = re.compile(r"INGOT_(\w+_)?PORT")


def _field(default: Any, help: str, **about: Any) -> Any:  # noqa: A002 - as typer calls it
    """Return a field of :class:`ServerConfig`; ``about`` are attributes of :class:`Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help=help, default=default, **about)})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Every setting is an option of ``ingot serve``, and a variable: ``max_batch`` is ``INGOT_MAX_BATCH``."""

    host: str = _field(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 for all IPv4 addresses, :: for IPv6",
        more="Without [`auth`](security.md#api-keys) every client that reaches the ports is served.",
        group=ADDRESSES,
    )
    http_port: int = _field(8000, "HTTP port; 0 for any free port", group=ADDRESSES, least=0, most=65535)
    grpc_port: int = _field(8001, "gRPC port; 0 for any free port", group=ADDRESSES, least=0, most=65535)
    grpc_server: Literal["fast", "grpcio"] = _field(
        "fast",
        "Which gRPC server: fast (our own) or grpcio (gRPC's own, which takes far more CPU)",
        more="See [gRPC](#grpc).",
        group=ADDRESSES,
    )
    tls_cert: Path | None = _field(
        None,
        "PEM file of a certificate and its chain; both ports then use TLS",
        more="See [TLS](#tls).",
        group=ADDRESSES,
        unset="no TLS",
    )
    tls_key: Path | None = _field(
        None, "PEM file of the certificate's key, without a password", group=ADDRESSES, unset="no TLS"
    )
    tls_client_ca: Path | None = _field(
        None,
        "PEM file of the authorities of client certificates, which every connection then needs",
        more="See [client certificates](security.md#client-certificates).",
        group=ACCESS,
        unset="none are asked for",
    )
    insecure: bool = _field(
        False,
        "Allow an address of other machines without TLS, or without keys or client certificates",
        more="See [addresses](security.md#addresses).",
        group=ACCESS,
    )
    auth: Path | None = _field(
        None,
        "File of the API keys that requests must have; it is read again when it changes",
        more="See [API keys](security.md#api-keys).",
        group=ACCESS,
        unset="all requests are served",
    )
    cors_origin: str | None = _field(
        None,
        "Origins of web pages that may use the HTTP port, separated by commas; * for all, without keys",
        more="See [web pages](security.md#web-pages).",
        group=ACCESS,
        unset="none",
    )
    audit_log: Path | None = _field(
        None,
        "Append refused requests and changes of keys and certificates to this file, as lines of JSON",
        more="See [the audit log](security.md#audit-log).",
        group=ACCESS,
        unset="none is written",
    )
    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "Where models run; auto is the GPU if there is one", group=MODELS
    )
    allow_code: bool = _field(
        False,
        "Load variants of formats that can run their author's code; ONNX cannot",
        more="See [formats that can run code](#formats-that-can-run-code).",
        group=MODELS,
    )
    trust: Path | None = _field(
        None,
        "Trust policy file: only archives that it trusts are served, with every blob's digest checked",
        more="See [the policy](registry.md#trust) and [what is checked](#trust).",
        group=MODELS,
        unset="all are served",
    )
    ort_library: Path | None = _field(
        None,
        "A library of custom operators for ONNX Runtime",
        more="It is [native code](custom-ops.md#onnx-runtime), and never comes from an archive.",
        group=MODELS,
        unset="none",
    )
    isolate: Literal["auto", "all", "none"] = _field(
        "auto",
        "Which models run in separate processes: auto (those that are not proved harmless), all or none",
        more="See [engine processes](#engine-processes).",
        group=MODELS,
    )
    engine_memory_mb: int | None = _field(
        None,
        "Most private memory of an engine process, in MiB",
        more="A request that needs more fails. See [engine processes](#engine-processes).",
        group=LIMITS,
        unset="no limit",
        least=128,
    )
    variant_choice: Literal["measured", "preferred"] = _field(
        "measured",
        "Which variant of an archive is served if none is named: measured (the fastest here) or preferred (the first "
        "that runs)",
        more="See [variants](#variants).",
        group=MODELS,
    )
    instances: int = _field(1, "Engines per model; they share the CPU cores", group=BATCHING, least=1, most=64)
    threads: int | None = _field(
        None,
        "CPU threads for one engine call",
        more="By default [as many as are worthwhile](#threads).",
        group=BATCHING,
        unset="as many as are worthwhile",
        least=1,
        most=1024,
    )
    max_batch: int = _field(64, "Maximum number of samples per engine call", group=BATCHING, least=1)
    slo: float | None = _field(
        None,
        "Deadline of requests without a timeout, such as 50ms; requests that cannot meet it are refused",
        more="A twentieth of it is reserved for the way back to the client. See [deadlines](#deadlines).",
        group=BATCHING,
        unset="no limit",
        above=0,
        most=3600,
        duration=True,
        needs_unit=True,
    )
    max_delay: float | None = _field(
        None,
        "Longest time that an idle engine waits for more samples, such as 2ms; 0 for no wait",
        group=BATCHING,
        unset="by the profile",
        least=0,
        most=60,
        duration=True,
        needs_unit=True,
    )
    max_queue: int = _field(
        4096,
        "Maximum number of requests queued per model; more are refused",
        more="A request of more samples than `max_batch` is queued in parts, two per instance at a time; other "
        "requests that arrive meanwhile run between them.",
        group=LIMITS,
        least=1,
    )
    max_queue_mb: int = _field(
        256,
        "Maximum size of queued requests per model, in MiB",
        more="Large requests count with all their parts.",
        group=LIMITS,
        least=1,
    )
    max_body_mb: int = _field(
        64, "Largest request in MiB, before and after decompression", group=LIMITS, least=1, most=2047
    )
    max_bodies_mb: int = _field(
        1024,
        "Maximum size of request bodies held at once, in MiB; more are refused",
        more="This counts bodies as received and after decompression: for HTTP from arrival to response, for the "
        "fast gRPC server those of more than one frame, separately for each protocol; and requests that [front "
        "processes](#front-processes) have passed to the models. A single request always fits.",
        group=LIMITS,
        least=1,
    )
    max_connections: int | None = _field(
        None,
        "Maximum number of open connections, of both protocols together; more are refused",
        more="See [limits on clients](#limits-on-clients).",
        group=LIMITS,
        unset="as many as there are file descriptors",
        least=1,
    )
    max_in_flight: int | None = _field(
        None,
        "Maximum number of unanswered requests per client; more are refused",
        more="See [limits on clients](#limits-on-clients).",
        group=LIMITS,
        unset="no limit",
        least=1,
    )
    max_rate: float | None = _field(
        None,
        "Maximum number of requests per second and client; more are refused",
        more="See [limits on clients](#limits-on-clients).",
        group=LIMITS,
        unset="no limit",
        above=0,
    )
    max_answer_mb: int = _field(
        512,
        "Largest outputs of one request, in MiB as raw tensors; a request that asks for more is refused",
        more="A few bytes can ask for any amount: a size that is an input of the model, say. The limit is checked "
        "before an answer is encoded.",
        group=LIMITS,
        least=1,
    )
    max_call_mb: int | None = _field(
        None,
        "Most memory of one engine call in MiB; requests that need more are refused",
        more="Predicted from the sizes of the inputs; batches are not grown beyond it. Where values decide on the "
        "memory, it limits what a call of the [engine process](#engine-processes) may add. See [memory](#memory).",
        group=LIMITS,
        unset="three quarters of the memory of the process, and 2048 where it cannot be predicted",
        least=1,
    )
    load_timeout: float = _field(
        300.0,
        "How long a model may take to load and to be tested and timed; 0 for no limit",
        more="After it the command ends with an error that names the model: a small graph can be made to load or run "
        "forever.",
        group=LIMITS,
        least=0,
        most=86400,
        duration=True,
    )
    engine_timeout: float | None = _field(
        None,
        "Longest time for one batch in the engine, after which its requests fail; 0 for no limit",
        more="See [engine calls that do not end](#engine-calls-that-do-not-end).",
        group=LIMITS,
        unset="50 times the expected time, at least 30s",
        least=0,
        most=86400,
        duration=True,
    )
    ready_delay: float = _field(
        0.0,
        "How long the server keeps serving at shutdown after it reports that it is not ready",
        more="See [shutdown](#shutdown).",
        group=LIMITS,
        least=0,
        most=3600,
        duration=True,
    )
    drain_timeout: float = _field(
        30.0, "How long requests in flight may take to finish at shutdown", group=LIMITS, least=0, duration=True
    )
    record: Path | None = _field(
        None,
        "Record a share of the requests and responses, which are users' data, in this folder",
        more="See [recording requests](#recording-requests).",
        group=RECORDING,
        unset="nothing is recorded",
    )
    record_share: float = _field(
        0.01, "Share of the requests to record, chosen at random", group=RECORDING, above=0, most=1
    )
    record_limit: int = _field(1000, "Maximum number of requests recorded per model version", group=RECORDING, least=1)
    record_limit_mb: int = _field(
        256, "Maximum size of the recording per model version, in MiB", group=RECORDING, least=1
    )
    frontends: int = _field(
        0,
        "Experimental: processes that speak HTTP and gRPC, next to the one with the models; no benchmark on a machine "
        "with many cores yet",
        more="See [front processes](#front-processes). With 0, the process with the models does both.",
        group=EXPERT,
        least=0,
        most=256,
    )
    choice_time: float = _field(
        0.3,
        "How long each variant is timed per batch size, if timing is needed",
        group=EXPERT,
        above=0,
        most=60,
        duration=True,
    )
    derived_cache: bool = _field(
        True,
        "Keep packed weights of large models next to the store, where processes share them",
        more="See [large models](#large-models).",
        group=EXPERT,
    )

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, options: bool = False) -> ServerConfig:
        """Return a configuration; what ``settings`` lacks comes from the environment or the defaults.

        Args:
            settings: by name.
            options: whether the user gave them as options of the command, so that messages call them that.

        Raises:
            InvalidArgument: a setting is unknown or has a wrong value; the message names it as the user wrote it.
        """
        known = cls.settings()
        _check_variables(known)
        for name in settings:
            if name not in known:
                raise InvalidArgument(f"there is no setting '{name}'; there are: {', '.join(known)}")
        variables = {name: os.environ.get(setting.variable) for name, setting in known.items()}
        given = {**{name: text for name, text in variables.items() if text is not None}, **settings}

        def called(name: str) -> str:
            if name in given and name not in settings:
                return known[name].variable
            return known[name].option if options else name

        values = {}
        for name, value in given.items():
            try:
                values[name] = known[name].read(value)
            except (ValueError, OverflowError, TypeError) as error:
                own = isinstance(error, NotDurationError)
                unit = " seconds" if known[name].duration and not own and not isinstance(value, str) else ""
                problem = str(error) if own else f"it must be {known[name].takes}"
                raise InvalidArgument(f"{called(name)} is {value!r}{unit}: {problem}") from error
        config = cls(**values)
        if config.http_port and config.http_port == config.grpc_port:
            raise InvalidArgument(
                f"{called('http_port')} and {called('grpc_port')} are both {config.http_port}; each protocol needs a "
                "separate port (0 for any free port)"
            )
        check_exposure(config, called)
        if config.grpc_server == "grpcio":
            for name in CLIENT_LIMITS:
                if getattr(config, name) is not None:
                    raise InvalidArgument(
                        f"{called(name)} has no effect on {called('grpc_server')} grpcio; use the server fast"
                    )
        return config

    @classmethod
    @cache
    def settings(cls) -> Mapping[str, Setting]:
        """Return what is known of each field, by its name."""
        hints = get_type_hints(cls)
        return {field.name: _named(field, hints[field.name]) for field in dataclasses.fields(cls)}

    @property
    def content(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: str(value) if isinstance(value, Path) else value for name, value in values}

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, as JSON has them, without the addresses."""
        known = self.settings()
        return {
            name: value
            for name, value in self.content.items()
            if value != known[name].default and name not in _ADDRESSES
        }

    @property
    def summary(self) -> str:
        """The same in one line, as they can be given."""
        known, changed = self.settings(), self.changed.items()
        return ", ".join(f"{name} {units.written(value) if known[name].duration else value}" for name, value in changed)

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb << 20

    @property
    def runtime(self) -> Settings:
        """The settings that the runtime takes."""
        from ingot.runtime import Limits, Settings, memory  # which --help does not need

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
            max_answer_bytes=self.max_answer_mb << 20,
            max_call_bytes=memory.for_engines() if self.max_call_mb is None else self.max_call_mb << 20,
            engine_call_mb=self.max_call_mb or Settings.engine_call_mb,
            engine_threads=self.threads,
            isolate=self.isolate,
            engine_memory_mb=self.engine_memory_mb,
            load_timeout=self.load_timeout or None,
        )


def _named(field: dataclasses.Field[Any], hint: Any) -> Setting:
    """Return a field's setting, with its name and what its type says."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    choices = tuple(kinds) if isinstance(kinds[0], str) else ()
    about: Setting = field.metadata["setting"]
    return dataclasses.replace(about, name=field.name, kind=str if choices else kinds[0], choices=choices)


def _check_variables(known: Mapping[str, Setting]) -> None:
    """Refuse a variable that nothing reads, since a misspelt setting would be ignored.

    Raises:
        InvalidArgument: names it, and the one that is most like it.
    """
    settings = [setting.variable for setting in known.values()]
    for name in sorted(os.environ):
        if not name.startswith("INGOT_") or name in settings or name in _OTHER_VARIABLES or _of_kubernetes(name):
            continue
        others = [other.removeprefix("INGOT_") for other in (*settings, *_OTHER_VARIABLES)]
        near = difflib.get_close_matches(name.removeprefix("INGOT_"), others, 1)
        remedy = f"did you mean INGOT_{near[0]}?" if near else "docs/serving.md lists them"
        raise InvalidArgument(f"unknown environment variable {name}; {remedy}")


def _of_kubernetes(name: str) -> bool:
    """Return whether Kubernetes set a variable. The name alone is not enough for a port: it may be misspelt."""
    if _SERVICE.fullmatch(name):
        return True
    host = f"{name.removesuffix('PORT')}SERVICE_HOST"
    return bool(_SERVICE_PORT.fullmatch(name)) and ("://" in os.environ[name] or host in os.environ)
