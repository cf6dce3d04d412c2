"""The settings of a server as a whole, each stated once; model_fields.py has those that each model may have.

The options of ``ingot serve``, its ``INGOT_...`` variables, the keys of ``ingot.toml`` with their JSON Schema, and the
table in docs/reference/settings.md are generated from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.config.setting import ACCESS, ADDRESSES, CANARY, LIMITS, MODELS, OBSERVATION, RECORDING, setting


@dataclass(frozen=True, kw_only=True)
class ServerFields:
    """The settings. Each is an option and a variable, such as ``INGOT_HTTP_PORT``, unless it is ``file_only``."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 for all IPv4 addresses, :: for IPv6",
        more="Without [`auth`](../guides/operate/access.md#api-keys) every client that reaches the ports is served.",
        group=ADDRESSES,
        common=True,
    )
    http_port: int = setting(8000, "HTTP port; 0 for any free port", group=ADDRESSES, least=0, most=65535, common=True)
    grpc_port: int = setting(8001, "gRPC port; 0 for any free port", group=ADDRESSES, least=0, most=65535, common=True)
    share_port: bool = setting(
        False,
        "Let several servers of this user, each with this option, listen on both ports; the kernel distributes the "
        "connections",
        more="See [several servers on one port](../guides/deploy/scale.md#several-servers-on-one-port).",
        group=ADDRESSES,
    )
    grpc_server: Literal["fast", "grpcio"] = setting(
        "fast",
        "Which gRPC server: fast (our own) or grpcio (gRPC's own, which takes far more CPU)",
        more="See [gRPC](../guides/serve/protocols.md#grpc).",
        group=ADDRESSES,
    )
    tls_cert: Path | None = setting(
        None,
        "PEM file of a certificate and its chain; both ports then use TLS",
        more="See [TLS](../guides/operate/access.md#tls).",
        group=ADDRESSES,
        unset="no TLS",
        common=True,
    )
    tls_key: Path | None = setting(
        None,
        "PEM file of the certificate's key, without a password",
        group=ADDRESSES,
        unset="no TLS",
        common=True,
    )
    tls_client_ca: Path | None = setting(
        None,
        "PEM file of the authorities of client certificates, which every connection then needs",
        more="See [client certificates](../guides/operate/access.md#client-certificates).",
        group=ACCESS,
        unset="none are asked for",
    )
    insecure: bool = setting(
        False,
        "Allow an address of other machines without TLS, or without keys or client certificates",
        more="See [addresses](../guides/operate/access.md#addresses).",
        group=ACCESS,
        common=True,
    )
    auth: Path | None = setting(
        None,
        "File of the API keys that requests must have; it is read again when it changes",
        more="See [API keys](../guides/operate/access.md#api-keys).",
        group=ACCESS,
        unset="all requests are served",
        common=True,
    )
    cors_origin: str | None = setting(
        None,
        "Origins of web pages that may use the HTTP port, separated by commas; * for all, without keys",
        more="See [web pages](../guides/operate/access.md#web-pages).",
        group=ACCESS,
        unset="none",
    )
    allowed_host: str | None = setting(
        None,
        "Names of the HTTP port's host, separated by commas; requests to other names are refused",
        more="Addresses and localhost are always allowed. See [web pages](../guides/operate/access.md#web-pages).",
        group=ACCESS,
        unset="all names",
    )
    shared_memory: str | None = setting(
        None,
        "Names of POSIX shared memory that clients may register, as shell patterns separated by commas; * for all",
        more="Tensors then need not be sent. It also lets clients register "
        "[memory of GPUs](../guides/serve/protocols.md#cuda-memory). "
        "See [shared memory](../guides/serve/protocols.md#shared-memory).",
        group=ACCESS,
        unset="off",
    )
    access_log: Literal["off", "sampled", "slow", "all"] = setting(
        "off",
        "Which requests are logged: off, sampled (some), slow (slow and failed ones) or all",
        more="See [access log](../guides/operate/observability.md#access-log).",
        group=OBSERVATION,
    )
    access_log_share: float = setting(
        0.01, "Share of the requests in the access log with --access-log sampled", group=OBSERVATION, above=0, most=1
    )
    access_log_slow: float = setting(
        1.0,
        "Time from which a request is in the access log with --access-log slow",
        group=OBSERVATION,
        least=0,
        duration=True,
    )
    log_format: Literal["human", "json"] = setting(
        "human",
        "How log records are written to stderr: human (lines for people) or json (an object per line)",
        more="See [logs](../guides/operate/observability.md#logs).",
        group=OBSERVATION,
        common=True,
    )
    replica: str | None = setting(
        None,
        "Name of this server among its replicas, in metrics and traces",
        more="See [replicas](../guides/operate/observability.md#replicas).",
        group=OBSERVATION,
        unset="the host's name",
    )
    otlp: str | None = setting(
        None,
        "Address of an OpenTelemetry collector for traces: http://HOST:4318 or grpc://HOST:4317",
        more="See [traces](../guides/operate/observability.md#traces).",
        group=OBSERVATION,
        unset="OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
        common=True,
    )
    otlp_share: float = setting(
        0.01,
        "Share of the requests without a trace context that are traced",
        group=OBSERVATION,
        least=0,
        most=1,
    )
    log_control: bool = setting(
        False,
        "Let clients change what the server logs",
        more="See [log settings](../guides/operate/management.md#log-settings).",
        group=ACCESS,
    )
    audit_log: Path | None = setting(
        None,
        "Append refused requests and changes of keys and certificates to this file, as lines of JSON",
        more="See [the audit log](../guides/operate/access.md#audit-log).",
        group=ACCESS,
        unset="none is written",
    )
    trust: Path | None = setting(
        None,
        "Trust policy file: only archives that it trusts are served, with every blob's digest checked",
        more="See [the policy](../guides/deploy/registry.md#trust) and "
        "[what is checked](../guides/serve/serving.md#trust).",
        group=MODELS,
        unset="all are served",
        common=True,
    )
    management: str | None = setting(
        None,
        "Where models are loaded and unloaded: a path of a Unix socket, HOST:PORT, or off",
        more="See [management](../guides/operate/management.md).",
        group=ADDRESSES,
        unset="a Unix socket that ingot server finds",
        common=True,
    )
    management_grpc: str | None = setting(
        None,
        "HOST:PORT of management over gRPC, or off",
        more="See [management](../guides/operate/management.md).",
        group=ADDRESSES,
        unset="off",
        off=True,
    )
    torchserve: bool = setting(
        False,
        "Also serve TorchServe's inference, management and metrics APIs, on its ports",
        more="See [from TorchServe](../guides/migrate/from-torchserve.md#its-apis).",
        group=ADDRESSES,
        common=True,
    )
    torchserve_ports: str = setting(
        "8080,8081,8082,7070,7071",
        "Ports of TorchServe's APIs: inference, management and metrics over HTTP, inference and management over gRPC; "
        "0 for any free port",
        more="Management listens on 127.0.0.1 only, and with `auth` or `insecure`.",
        group=ADDRESSES,
        pattern=r"\d{1,5}(,\d{1,5}){4}",
        form="five ports, separated by commas",
    )
    page: bool = setting(
        True,
        "Show the server's models, load and latencies on a page at /ui",
        more="A [management](../guides/operate/management.md) port has it instead of the HTTP port. "
        "See [the page](../guides/operate/page.md).",
        group=ADDRESSES,
    )
    watch: float | None = setting(
        30.0,
        "How often to poll registries for alias changes; those of the store take effect at once. off: follow no alias",
        more="See [changing versions](../concepts/versions.md).",
        group=MODELS,
        unset="off",
        above=0,
        duration=True,
        needs_unit=True,
        off=True,
        common=True,
    )
    max_body_mb: int = setting(
        64, "Largest request in MiB, before and after decompression", group=LIMITS, least=1, most=2047
    )
    max_bodies_mb: int = setting(
        1024,
        "Maximum size of request bodies held at once, in MiB; more are refused",
        more="This counts bodies as received and after decompression: for HTTP from arrival to response, for the "
        "fast gRPC server those of more than one frame, separately for each protocol. A single request always fits.",
        group=LIMITS,
        least=1,
    )
    max_connections: int | None = setting(
        None,
        "Maximum number of open connections, of both protocols together; more are refused",
        more="See [limits on clients](../guides/operate/limits-on-clients.md).",
        group=LIMITS,
        unset="as many as there are file descriptors",
        least=1,
    )
    max_in_flight: int | None = setting(
        None,
        "Maximum number of unanswered requests per client; more are refused",
        more="See [limits on clients](../guides/operate/limits-on-clients.md).",
        group=LIMITS,
        unset="no limit",
        least=1,
    )
    max_rate: float | None = setting(
        None,
        "Maximum number of requests per second and client; more are refused",
        more="See [limits on clients](../guides/operate/limits-on-clients.md).",
        group=LIMITS,
        unset="no limit",
        above=0,
    )
    memory_budget: str | None = setting(
        None,
        "Most memory of models: 4GB, or by device cpu=4GB,cuda=8GB; models beyond it are loaded when a request comes",
        more="See [memory budget](../guides/serve/memory.md#memory-budget).",
        group=LIMITS,
        unset="no limit",
        pattern=r"((cpu|cuda)=)?\d+(\.\d+)? ?[KMGT]i?B(,(cpu|cuda)=\d+(\.\d+)? ?[KMGT]i?B)?",
        form="a size: 4GB, or cpu=4GB,cuda=8GB",
        common=True,
    )
    engine_timeout: float | None = setting(
        None,
        "Longest time for one batch in the engine, after which its requests fail; 0 for no limit",
        more="See [engine calls that do not end](../concepts/isolation.md#engine-calls-that-do-not-end).",
        group=LIMITS,
        unset="50 times the expected time, at least 30s",
        least=0,
        most=86400,
        duration=True,
    )
    ready_delay: float = setting(
        0.0,
        "How long the server keeps serving at shutdown after it reports that it is not ready",
        more="See [shutdown](../guides/deploy/containers.md#shutdown).",
        group=LIMITS,
        least=0,
        most=3600,
        duration=True,
    )
    drain_timeout: float = setting(
        30.0,
        "How long requests in flight may take to finish at shutdown",
        group=LIMITS,
        least=0,
        duration=True,
        common=True,
    )
    sticky_header: str | None = setting(
        None,
        "Header that names the client, for canary_sticky",
        more="Only behind a gateway that sets it. By default the API key, the certificate or the connection is the "
        "client.",
        group=CANARY,
        unset="none",
        pattern=r"[A-Za-z0-9!#$%&'*+.^_`|~-]+",
        form="the name of a header",
        file_only=True,
    )
    record: Path | None = setting(
        None,
        "Record a share of the requests and responses, which are users' data, in this folder",
        more="See [recording requests](../guides/operate/management.md#recording-requests).",
        group=RECORDING,
        unset="nothing is recorded",
    )
    record_share: float = setting(
        0.01, "Share of the requests to record, chosen at random", group=RECORDING, above=0, most=1
    )
    record_limit: int = setting(1000, "Maximum number of requests recorded per model version", group=RECORDING, least=1)
    record_limit_mb: int = setting(
        256, "Maximum size of the recording per model version, in MiB", group=RECORDING, least=1
    )
