"""What a deployment runs, with the values that follow from its models and the server's settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ingot.errors import InvalidArgument
from ingot.model_store import Archive, Reference

READINESS_PERIOD, READINESS_FAILURES = 5, 2
"""Seconds between two readiness probes, and how many must fail before a pod gets no new requests."""
_PROPAGATION = 5
"""Seconds until every node's proxy knows that a pod is leaving."""
_STOPPING = 20
"""Seconds for a server to end after its own limits; it ends itself after 15."""
_STARTUP_PERIOD = 2
_SLOWEST_PULL = 10 << 20
"""Bytes per second from a registry, below which a pod is given up."""
_UNLIMITED_LOAD = 3600.0
_SERVER = 256 << 20
"""Memory of a server without a model; 108 MiB were measured."""
_PROCESS, _TORCH_PROCESS = 64 << 20, 512 << 20
"""Memory of an engine process without a model, and of one with PyTorch."""
_REQUESTS = 10_000
"""Requests per second that one server can read and answer, however fast its model is."""
_BUSY = 0.5
"""The share of a deadline that requests may spend waiting before replicas are added."""
_LEAST_WAIT, _UNKNOWN_WAIT = 0.02, 0.1
"""Seconds of waiting that are never worth a replica, and those that are if no latency is recorded."""


class Settings(Protocol):
    """The settings of the server that decide on its surroundings; see :class:`ingot.config.ServerConfig`."""

    @property
    def http_port(self) -> int: ...
    @property
    def grpc_port(self) -> int: ...
    @property
    def tls_cert(self) -> object: ...
    @property
    def auth(self) -> object: ...
    @property
    def ready_delay(self) -> float: ...
    @property
    def drain_timeout(self) -> float: ...
    @property
    def load_timeout(self) -> float: ...
    @property
    def instances(self) -> int: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def max_queue(self) -> int: ...
    @property
    def max_bodies_mb(self) -> int: ...
    @property
    def max_answer_mb(self) -> int: ...
    @property
    def slo(self) -> float | None: ...
    @property
    def allow_code(self) -> bool: ...
    @property
    def isolate(self) -> str: ...
    @property
    def states(self) -> str | None: ...


@dataclass(frozen=True)
class Served:
    """A model of a registry, by digest.

    Attributes:
        name: as clients call it.
        reference: where pods read it, with its digest.
        nbytes: the graph and weights of the variant that takes most.
        archive_nbytes: what a pod pulls.
        latency: seconds of an engine call by batch size, as the archive records them; empty if it does not.
        alias: the tag that servers follow, instead of the digest; empty if they do not.
        formats: of the variants that may be served.
        isolated: whether an engine process runs it, unless the settings say otherwise.
        sequential: whether the archive has states.
    """

    name: str
    reference: Reference
    nbytes: int
    archive_nbytes: int
    latency: Mapping[int, float]
    alias: str = ""
    formats: frozenset[str] = frozenset({"onnx"})
    isolated: bool = False
    sequential: bool = False

    @classmethod
    def of(cls, name: str, reference: Reference, archive: Archive, alias: str = "") -> Served:
        """Return an archive as it is served from a registry.

        Args:
            name: as clients call it.
            reference: in the registry, with a version; its variant, if any, is the one that is served.
            archive: its documents.
            alias: the tag that servers follow; empty for those that serve the digest.
        """
        variant = archive.variant(reference.variant)
        usable = [variant] if reference.variant else archive.variants
        bounds = [each.serving.evidence.bounds for each in usable]
        defaults = variant.serving.defaults
        return cls(
            name,
            replace(reference, digest=archive.digest),
            max(each.size for each in usable),
            archive.size,
            {item.rows: item.seconds for item in variant.serving.evidence.latency},
            alias,
            formats=frozenset(each.serving.format for each in usable),
            isolated=any(found is None or bool(found.reasons) for found in bounds),
            sequential=defaults is not None and bool(defaults.states),
        )

    @property
    def source(self) -> str:
        """The argument of ``ingot serve``."""
        found = replace(self.reference, tag=self.alias, digest=None) if self.alias else self.reference
        return f"{self.name}={found}"

    @property
    def in_torch(self) -> bool:
        """Whether a variant that may be served runs in PyTorch."""
        return not self.formats <= {"onnx", "python"}

    def memory(self, settings: Settings) -> int:
        """Return the bytes that a server has in memory for the model."""
        if settings.isolate == "none" or not (self.isolated or self.in_torch or settings.isolate == "all"):
            return self.nbytes + (_TORCH_PROCESS - _PROCESS if self.in_torch and settings.allow_code else 0)
        own = _TORCH_PROCESS if self.in_torch and settings.allow_code else _PROCESS
        return (self.nbytes + own) * settings.instances

    def busy_at(self, settings: Settings) -> int:
        """Return the number of unanswered requests, of one sample each, from which a server should get help.

        With a deadline, those that are answered in half of it at the recorded latencies. Otherwise two batches of the
        size with the highest throughput: one runs and the next one fills.
        """
        found = self._best(settings)
        if found is None:
            wanted = 2 * settings.max_batch
        else:
            best, seconds = found
            rate = min(best / seconds, _REQUESTS)
            wanted = 2 * best if settings.slo is None else int(settings.slo * _BUSY * rate)
        return min(max(wanted, 1) * settings.instances, settings.max_queue)

    def wait_at(self, settings: Settings) -> float:
        """Return the expected wait, in seconds, from which a server should get help.

        With a deadline, half of it. Otherwise two batches of the size with the highest throughput, and not less than
        what proxies and networks add to a request anyway.
        """
        if settings.slo is not None:
            return settings.slo * _BUSY
        found = self._best(settings)
        return max(_LEAST_WAIT, 2 * found[1]) if found is not None else _UNKNOWN_WAIT

    def _best(self, settings: Settings) -> tuple[int, float] | None:
        """Return the recorded batch size with the highest throughput, of those that the settings allow."""
        usable = {rows: seconds for rows, seconds in self.latency.items() if rows <= settings.max_batch}
        if settings.slo is not None:
            usable = {rows: seconds for rows, seconds in usable.items() if seconds <= settings.slo * _BUSY}
        return max(usable.items(), key=lambda item: item[0] / item[1], default=None)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A deployment of one server in several replicas.

    Attributes:
        name: of all objects.
        models: at least one.
        image: of the container.
        settings: of the server.
        environment: its variables, but for those that follow from the plan.
        replicas: the least and the most.
        cpu: cores of a replica; None for as many as the settings use.
        gpus: NVIDIA GPUs of a replica.
        secret: the Secret with certificates and keys, mounted at ``/access``.
        pull_secret: the Secret with the registry's credentials.
        monitoring: the namespace of Prometheus.
        monitor_labels: labels by which Prometheus's operator selects monitors.
        has_torch: whether the image has PyTorch, which those of ``Dockerfile`` have not.
        node_store: a folder of each node, which its pods share as their store; None for a store of each pod.
    """

    name: str
    models: tuple[Served, ...]
    image: str
    settings: Settings
    environment: Mapping[str, str]
    replicas: tuple[int, int] = (2, 8)
    cpu: int | None = None
    gpus: int = 0
    secret: str | None = None
    pull_secret: str | None = None
    monitoring: str = "monitoring"
    monitor_labels: Mapping[str, str] = field(default_factory=dict)
    has_torch: bool = False
    node_store: str | None = None

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", self.name) is None:
            raise InvalidArgument(
                f"'{self.name}' cannot name objects of Kubernetes; use --name with up to 53 lower-case letters, digits "
                "and -, from a letter"
            )
        named = {"--secret": self.secret, "--pull-secret": self.pull_secret, "--monitoring": self.monitoring}
        for option, name in named.items():
            if name is not None and re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name) is None:
                raise InvalidArgument(
                    f"{option} '{name}' is not a name of Kubernetes: write lower-case letters, digits, - and ."
                )
        for model in self.models:
            self._check_runs(model)

    def _check_runs(self, model: Served) -> None:
        """Check that pods can serve a variant of a model.

        Raises:
            InvalidArgument: none of its formats is allowed, or the image has no engine for them.
        """
        if "onnx" in model.formats:
            return
        formats = ", ".join(sorted(model.formats))
        if not self.settings.allow_code:
            raise InvalidArgument(
                f"'{model.name}' has only variants of formats that can run their author's code ({formats}), which pods "
                "refuse; give --allow-code, or export a variant of format onnx"
            )
        if not self.has_torch and model.in_torch:
            raise InvalidArgument(
                f"'{model.name}' runs in PyTorch (format {formats}), which the images of Dockerfile do not have; build "
                "one with ingot-serve[export], and give --image-has-torch"
            )

    @property
    def cores(self) -> int:
        return self.cpu or used_cores(self.settings)

    @property
    def memory_request(self) -> int:
        """Bytes that a replica holds once its models are loaded."""
        return held_memory(self.models, self.settings)

    @property
    def memory_limit(self) -> int:
        """The request, and the bodies and outputs that the server's limits allow at once."""
        return self.memory_request + (self.settings.max_bodies_mb + self.settings.max_answer_mb << 20)

    @property
    def store_limit(self) -> int:
        """Bytes of the store: the archives, and as much again for weights that engines have repacked."""
        return (64 << 20) + 2 * sum(model.archive_nbytes for model in self.models)

    @property
    def leaving(self) -> int:
        """Seconds in which a pod that leaves still gets new requests."""
        return READINESS_PERIOD * READINESS_FAILURES + _PROPAGATION

    @property
    def pre_stop(self) -> int:
        """Seconds of those before SIGTERM; the server keeps serving for its ``ready_delay`` after it."""
        return max(0, math.ceil(self.leaving - self.settings.ready_delay))

    @property
    def grace(self) -> int:
        """Seconds from the beginning of the end until a pod is killed."""
        return self.pre_stop + math.ceil(self.settings.ready_delay + self.settings.drain_timeout) + _STOPPING

    @property
    def startup_failures(self) -> int:
        """Startup probes that may fail: for the time that pulling and loading may take."""
        loading = len(self.models) * (self.settings.load_timeout or _UNLIMITED_LOAD)
        pulling = sum(model.archive_nbytes for model in self.models) / _SLOWEST_PULL
        return math.ceil((loading + pulling) / _STARTUP_PERIOD)

    @property
    def startup_period(self) -> int:
        return _STARTUP_PERIOD

    @property
    def registry_ports(self) -> list[int]:
        """The ports of the models' registries, sorted."""
        addresses = {model.reference.registry for model in self.models}
        return sorted({each.port or (80 if each.url.startswith("http:") else 443) for each in addresses if each})


def held_memory(models: Sequence[Served], settings: Settings) -> int:
    """Return the bytes of a server with models in memory, and of their engine processes."""
    return _SERVER + sum(model.memory(settings) for model in models)


def used_cores(settings: Settings) -> int:
    """Return the cores that the engines of a model use by default."""
    return settings.instances * (settings.threads or 2)


def object_name(text: str) -> str:
    """Return the name for objects that is closest to a model's: ``team/My_Net`` becomes ``my-net``."""
    return re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower()).strip("-")[:53].rstrip("-")


def parse_range(text: str) -> tuple[int, int]:
    """Return the least and the most replicas of ``2..8``, or of one number.

    Raises:
        InvalidArgument: it is neither, or not in order.
    """
    least, dots, most = text.partition("..")
    if not (least.isdecimal() and (most.isdecimal() or not dots)):
        raise InvalidArgument(f"--replicas '{text}' is not a number or a range; write 4 or 2..8")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise InvalidArgument(f"--replicas {text}: the least must be at least 1 and at most the most")
    return found
