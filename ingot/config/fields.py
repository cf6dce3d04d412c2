"""The server's settings, each stated once.

The options of ``ingot serve``, its ``INGOT_...`` variables, the keys of ``ingot.toml`` with their JSON Schema, and the
table in docs/reference/settings.md are generated from these fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.config.setting import Setting
from ingot.permissions import NAMES, PERMISSIONS

_PERMISSION = "|".join(PERMISSIONS)
# The groups of the options in --help.
ADDRESSES = "Addresses"
ACCESS = "Access"
MODELS = "Models"
BATCHING = "Batching (the defaults measure the model)"
LIMITS = "Limits"
CANARY = "Canary (new versions that take over step by step)"
OBSERVATION = "Logs and traces"
RECORDING = "Recording requests"
EXPERT = "For experts"


def _field(default: Any, help: str, **about: Any) -> Any:  # noqa: A002 - as typer calls it
    """Return a field of :class:`Fields`; ``about`` are attributes of :class:`Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help=help, default=default, **about)})


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The settings. Each is an option and a variable, such as ``INGOT_MAX_BATCH``, unless it is ``file_only``."""

    host: str = _field(
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 for all IPv4 addresses, :: for IPv6",
        more="Without [`auth`](../guides/operate/access.md#api-keys) every client that reaches the ports is served.",
        group=ADDRESSES,
        common=True,
    )
    http_port: int = _field(8000, "HTTP port; 0 for any free port", group=ADDRESSES, least=0, most=65535, common=True)
    grpc_port: int = _field(8001, "gRPC port; 0 for any free port", group=ADDRESSES, least=0, most=65535, common=True)
    share_port: bool = _field(
        False,
        "Let several servers of this user, each with this option, listen on both ports; the kernel distributes the "
        "connections",
        more="See [several servers on one port](../guides/deploy/scale.md#several-servers-on-one-port).",
        group=ADDRESSES,
    )
    grpc_server: Literal["fast", "grpcio"] = _field(
        "fast",
        "Which gRPC server: fast (our own) or grpcio (gRPC's own, which takes far more CPU)",
        more="See [gRPC](../guides/serve/protocols.md#grpc).",
        group=ADDRESSES,
    )
    tls_cert: Path | None = _field(
        None,
        "PEM file of a certificate and its chain; both ports then use TLS",
        more="See [TLS](../guides/operate/access.md#tls).",
        group=ADDRESSES,
        unset="no TLS",
        common=True,
    )
    tls_key: Path | None = _field(
        None,
        "PEM file of the certificate's key, without a password",
        group=ADDRESSES,
        unset="no TLS",
        common=True,
    )
    tls_client_ca: Path | None = _field(
        None,
        "PEM file of the authorities of client certificates, which every connection then needs",
        more="See [client certificates](../guides/operate/access.md#client-certificates).",
        group=ACCESS,
        unset="none are asked for",
    )
    insecure: bool = _field(
        False,
        "Allow an address of other machines without TLS, or without keys or client certificates",
        more="See [addresses](../guides/operate/access.md#addresses).",
        group=ACCESS,
        common=True,
    )
    auth: Path | None = _field(
        None,
        "File of the API keys that requests must have; it is read again when it changes",
        more="See [API keys](../guides/operate/access.md#api-keys).",
        group=ACCESS,
        unset="all requests are served",
        common=True,
    )
    cors_origin: str | None = _field(
        None,
        "Origins of web pages that may use the HTTP port, separated by commas; * for all, without keys",
        more="See [web pages](../guides/operate/access.md#web-pages).",
        group=ACCESS,
        unset="none",
    )
    allowed_host: str | None = _field(
        None,
        "Names of the HTTP port's host, separated by commas; requests to other names are refused",
        more="Addresses and localhost are always allowed. See [web pages](../guides/operate/access.md#web-pages).",
        group=ACCESS,
        unset="all names",
    )
    shared_memory: str | None = _field(
        None,
        "Names of POSIX shared memory that clients may register, as shell patterns separated by commas; * for all",
        more="Tensors then need not be sent. It also lets clients register "
        "[memory of GPUs](../guides/serve/protocols.md#cuda-memory). "
        "See [shared memory](../guides/serve/protocols.md#shared-memory).",
        group=ACCESS,
        unset="off",
    )
    access_log: Literal["off", "sampled", "slow", "all"] = _field(
        "off",
        "Which requests are logged: off, sampled (some), slow (slow and failed ones) or all",
        more="See [access log](../guides/operate/observability.md#access-log).",
        group=OBSERVATION,
    )
    access_log_share: float = _field(
        0.01, "Share of the requests in the access log with --access-log sampled", group=OBSERVATION, above=0, most=1
    )
    access_log_slow: float = _field(
        1.0,
        "Time from which a request is in the access log with --access-log slow",
        group=OBSERVATION,
        least=0,
        duration=True,
    )
    log_format: Literal["human", "json"] = _field(
        "human",
        "How log records are written to stderr: human (lines for people) or json (an object per line)",
        more="See [logs](../guides/operate/observability.md#logs).",
        group=OBSERVATION,
        common=True,
    )
    replica: str | None = _field(
        None,
        "Name of this server among its replicas, in metrics and traces",
        more="See [replicas](../guides/operate/observability.md#replicas).",
        group=OBSERVATION,
        unset="the host's name",
    )
    otlp: str | None = _field(
        None,
        "Address of an OpenTelemetry collector for traces: http://HOST:4318 or grpc://HOST:4317",
        more="See [traces](../guides/operate/observability.md#traces).",
        group=OBSERVATION,
        unset="OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
        common=True,
    )
    otlp_share: float = _field(
        0.01,
        "Share of the requests without a trace context that are traced",
        group=OBSERVATION,
        least=0,
        most=1,
    )
    log_control: bool = _field(
        False,
        "Let clients change what the server logs",
        more="See [log settings](../guides/operate/management.md#log-settings).",
        group=ACCESS,
    )
    audit_log: Path | None = _field(
        None,
        "Append refused requests and changes of keys and certificates to this file, as lines of JSON",
        more="See [the audit log](../guides/operate/access.md#audit-log).",
        group=ACCESS,
        unset="none is written",
    )
    device: str = _field(
        "auto",
        "Where models run: cpu, cuda:0,1 for two GPUs, or auto, the least busy GPU with enough memory if there is one",
        more="See [GPUs](../guides/serve/gpu.md).",
        group=MODELS,
        pattern=r"(auto|cpu|cuda|(?!auto|cpu)[a-z]\w*:\d+(,\d+)*)",
        form="auto, cpu, cuda, or cuda:0,1 with the indices of GPUs",
        per_model=True,
        common=True,
    )
    engine: str | None = _field(
        None,
        "Engine of all ONNX graphs: onnxruntime, openvino, tensorrt, or one of a plug-in",
        unset="the one that a variant names, or else onnxruntime",
        more="A model whose goldens it does not reproduce is refused, and so are models of other formats. See "
        "[TensorRT](../guides/serve/gpu.md#tensorrt) and [plug-ins](../guides/serve/gpu.md#plug-ins).",
        group=EXPERT,
        per_model=True,
    )
    allow_code: bool = _field(
        False,
        "Load variants of formats that can run their author's code; ONNX cannot",
        more="See [formats that can run code](../guides/serve/serving.md#formats-that-can-run-code).",
        group=MODELS,
        per_model=True,
        common=True,
    )
    trust: Path | None = _field(
        None,
        "Trust policy file: only archives that it trusts are served, with every blob's digest checked",
        more="See [the policy](../guides/deploy/registry.md#trust) and "
        "[what is checked](../guides/serve/serving.md#trust).",
        group=MODELS,
        unset="all are served",
        common=True,
    )
    management: str | None = _field(
        None,
        "Where models are loaded and unloaded: a path of a Unix socket, HOST:PORT, or off",
        more="See [management](../guides/operate/management.md).",
        group=ADDRESSES,
        unset="a Unix socket that ingot server finds",
        common=True,
    )
    management_grpc: str | None = _field(
        None,
        "HOST:PORT of management over gRPC, or off",
        more="See [management](../guides/operate/management.md).",
        group=ADDRESSES,
        unset="off",
        off=True,
    )
    torchserve: bool = _field(
        False,
        "Also serve TorchServe's inference, management and metrics APIs, on its ports",
        more="See [from TorchServe](../guides/migrate/from-torchserve.md#its-apis).",
        group=ADDRESSES,
        common=True,
    )
    torchserve_ports: str = _field(
        "8080,8081,8082,7070,7071",
        "Ports of TorchServe's APIs: inference, management and metrics over HTTP, inference and management over gRPC; "
        "0 for any free port",
        more="Management listens on 127.0.0.1 only, and with `auth` or `insecure`.",
        group=ADDRESSES,
        pattern=r"\d{1,5}(,\d{1,5}){4}",
        form="five ports, separated by commas",
    )
    page: bool = _field(
        True,
        "Show the server's models, load and latencies on a page at /ui",
        more="A [management](../guides/operate/management.md) port has it instead of the HTTP port. "
        "See [the page](../guides/operate/page.md).",
        group=ADDRESSES,
    )
    watch: float | None = _field(
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
    ort_library: Path | None = _field(
        None,
        "A library of custom operators for ONNX Runtime",
        more="It is [native code](../guides/make/custom-ops.md#onnx-runtime), and never comes from an archive.",
        group=MODELS,
        unset="none",
        per_model=True,
    )
    isolate: Literal["auto", "all", "none"] = _field(
        "auto",
        "Which models run in separate processes: auto (those that are not proved harmless), all or none",
        more="See [engine processes](../concepts/isolation.md).",
        group=MODELS,
        per_model=True,
    )
    engine_memory_mb: int | None = _field(
        None,
        "Most private memory of an engine process, in MiB",
        more="A request that needs more fails. See [engine processes](../concepts/isolation.md).",
        group=LIMITS,
        unset="no limit",
        least=128,
        per_model=True,
    )
    labels: Path | None = _field(
        None,
        "File with the names of classes, a line for each, in the order of an output's values",
        more="See [classes](../guides/serve/protocols.md#classes).",
        group=MODELS,
        unset="none",
        per_model=True,
    )
    variant_choice: Literal["measured", "preferred"] = _field(
        "measured",
        "Which variant of an archive is served if none is named: measured (the fastest here) or preferred (the first "
        "that runs)",
        more="See [variants](../guides/serve/serving.md#variants).",
        group=MODELS,
        per_model=True,
    )
    verify_batches: float = _field(
        0.001,
        "Share of the batches whose requests run again, each alone, to compare the answers; 0 for none",
        more="See [guard](../concepts/batching.md#guard).",
        group=BATCHING,
        least=0,
        most=1,
        per_model=True,
    )
    instances: int = _field(
        1,
        "Engines per model and device; they share the CPU cores",
        group=BATCHING,
        least=1,
        most=64,
        per_model=True,
        common=True,
    )
    lanes: int = _field(
        3,
        "Batches that an engine on a GPU has in flight, so that copies and computation overlap",
        more="See [GPUs](../guides/serve/gpu.md#lanes).",
        group=BATCHING,
        least=1,
        most=16,
        per_model=True,
    )
    cuda_graphs: Literal["auto", "on", "off"] = _field(
        "auto",
        "Capture batches on a GPU as CUDA graphs: auto (PyTorch's engines), on (ONNX Runtime too) or off",
        more="See [CUDA graphs](../guides/serve/gpu.md#cuda-graphs).",
        group=BATCHING,
        per_model=True,
    )
    convolutions: Literal["auto", "default", "nhwc", "heuristic"] = _field(
        "auto",
        "How ONNX Runtime computes convolutions on a GPU: auto (the fastest of the others, measured at load), default, "
        "nhwc (channels last) or heuristic (shorter planning)",
        more="See [convolutions](../guides/serve/gpu.md#convolutions).",
        group=EXPERT,
        per_model=True,
    )
    gpu_arena: Literal["doubled", "exact"] = _field(
        "doubled",
        "How ONNX Runtime's memory of a GPU grows: doubled, or exact (as much as a call needs)",
        more="See [memory](../guides/serve/gpu.md#memory).",
        group=EXPERT,
        per_model=True,
    )
    shards: int = _field(
        1,
        "Processes, each with its own GPU if there are any, over which one copy of a model is divided",
        more="Only of format `pt2`. See [models larger than a GPU](../guides/serve/sharding.md).",
        group=MODELS,
        least=1,
        most=64,
        per_model=True,
    )
    threads: int | None = _field(
        None,
        "CPU threads for one engine call",
        more="By default [as many as are worthwhile](../guides/serve/tune.md#threads).",
        group=BATCHING,
        unset="as many as are worthwhile",
        least=1,
        most=1024,
        per_model=True,
        common=True,
    )
    max_batch: int = _field(
        64, "Maximum number of samples per engine call", group=BATCHING, least=1, per_model=True, common=True
    )
    slo: float | None = _field(
        None,
        "Deadline of requests without a timeout, such as 50ms; requests that cannot meet it are refused",
        more="A twentieth of it is reserved for the transfer of the response to the client. "
        "See [deadlines](../concepts/batching.md#deadlines).",
        group=BATCHING,
        unset="no limit",
        above=0,
        most=3600,
        duration=True,
        needs_unit=True,
        per_model=True,
        common=True,
    )
    max_delay: float | None = _field(
        None,
        "Longest time that an idle engine waits for more samples, such as 2ms; 0 for no wait",
        group=BATCHING,
        unset="derived from the measured latencies",
        least=0,
        most=60,
        duration=True,
        needs_unit=True,
        per_model=True,
        common=True,
    )
    max_queue: int = _field(
        4096,
        "Maximum number of requests queued per model; more are refused",
        more="A request of more samples than `max_batch` is queued in parts, two per instance at a time; other "
        "requests that arrive meanwhile run between them.",
        group=LIMITS,
        least=1,
        per_model=True,
        common=True,
    )
    max_queue_mb: int = _field(
        256,
        "Maximum size of queued requests per model, in MiB",
        more="Large requests count with all their parts.",
        group=LIMITS,
        least=1,
        per_model=True,
    )
    max_body_mb: int = _field(
        64, "Largest request in MiB, before and after decompression", group=LIMITS, least=1, most=2047
    )
    max_bodies_mb: int = _field(
        1024,
        "Maximum size of request bodies held at once, in MiB; more are refused",
        more="This counts bodies as received and after decompression: for HTTP from arrival to response, for the "
        "fast gRPC server those of more than one frame, separately for each protocol. A single request always fits.",
        group=LIMITS,
        least=1,
    )
    max_connections: int | None = _field(
        None,
        "Maximum number of open connections, of both protocols together; more are refused",
        more="See [limits on clients](../guides/operate/limits-on-clients.md).",
        group=LIMITS,
        unset="as many as there are file descriptors",
        least=1,
    )
    max_in_flight: int | None = _field(
        None,
        "Maximum number of unanswered requests per client; more are refused",
        more="See [limits on clients](../guides/operate/limits-on-clients.md).",
        group=LIMITS,
        unset="no limit",
        least=1,
    )
    max_rate: float | None = _field(
        None,
        "Maximum number of requests per second and client; more are refused",
        more="See [limits on clients](../guides/operate/limits-on-clients.md).",
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
        per_model=True,
    )
    max_call_mb: int | None = _field(
        None,
        "Most memory of one engine call in MiB; requests that need more are refused",
        more="Predicted from the sizes of the inputs; batches are not grown beyond it. Where values decide how much "
        "memory is needed, it limits what a call of the [engine process](../concepts/isolation.md) may add. "
        "See [memory](../guides/serve/memory.md).",
        group=LIMITS,
        unset="three quarters of the memory of the process, and 2048 where it cannot be predicted",
        least=1,
        per_model=True,
    )
    memory_budget: str | None = _field(
        None,
        "Most memory of models: 4GB, or by device cpu=4GB,cuda=8GB; models beyond it are loaded when a request comes",
        more="See [memory budget](../guides/serve/memory.md#memory-budget).",
        group=LIMITS,
        unset="no limit",
        pattern=r"((cpu|cuda)=)?\d+(\.\d+)? ?[KMGT]i?B(,(cpu|cuda)=\d+(\.\d+)? ?[KMGT]i?B)?",
        form="a size: 4GB, or cpu=4GB,cuda=8GB",
        common=True,
    )
    states: str | None = _field(
        None,
        "Inputs that the server keeps between the requests of a sequence, each with the output that is its next value",
        more="Such as `h=h_next,c=c_next`. See [sequences](../guides/serve/sequences.md#sequences).",
        group=MODELS,
        unset="none",
        pattern=r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*",
        form="pairs of an input and an output: h=h_next,c=c_next",
        per_model=True,
    )
    repeat: str | None = _field(
        None,
        "Run the model again after each answer, with these inputs from outputs, and send each answer",
        more="Such as `ids=next_ids`. See [several answers](../guides/serve/sequences.md#several-answers).",
        group=MODELS,
        unset="one answer",
        pattern=r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*",
        form="pairs of an input and an output: ids=next_ids",
        per_model=True,
    )
    install_requirements: bool = _field(
        False,
        "Install the versions of packages that models in Python require, into separate folders",
        more="See [requirements](../guides/make/python-model.md#requirements).",
        group=MODELS,
        per_model=True,
    )
    permit: str | None = _field(
        None,
        f"Permissions of models in Python, for those that ask for them: {NAMES}",
        more="See [permissions](../guides/make/python-model.md#permissions).",
        group=MODELS,
        unset="nothing",
        pattern=f"({_PERMISSION})(,({_PERMISSION}))*",
        form=f"some of {NAMES}, separated by commas",
        per_model=True,
    )
    model_settings: str | None = _field(
        None,
        "Values that a model in Python gets as context.settings, as texts",
        more="Such as `language=en,beams=4`. See [a model in Python](../guides/make/python-model.md#settings).",
        group=MODELS,
        unset="none",
        pattern=r"[^=,]+=[^=,]*(,[^=,]+=[^=,]*)*",
        form="pairs of a name and a value: language=en,beams=4",
        per_model=True,
    )
    repeat_until: str | None = _field(
        None,
        "The BOOL output that is true in the last answer of a model with --repeat",
        group=MODELS,
        unset="none",
        per_model=True,
    )
    max_steps: int = _field(
        256, "Most answers to a request of a model with --repeat", group=LIMITS, least=1, per_model=True
    )
    slots: int = _field(
        16,
        "Requests that a decoder, a model that generates tokens, answers at a time; others wait",
        group=BATCHING,
        least=1,
        most=1024,
        per_model=True,
    )
    context: int | None = _field(
        None,
        "Most tokens of a request to a decoder, prompt and answer; each slot has memory for them",
        group=BATCHING,
        unset="all positions that the model knows, up to 2048",
        least=2,
        most=1 << 20,
        per_model=True,
    )
    prompt_delay: float = _field(
        0.2,
        "How long answers of a decoder may wait for a part of another request's prompt",
        group=BATCHING,
        least=0,
        duration=True,
        per_model=True,
    )
    max_sequences: int = _field(
        1024, "Most open sequences of a model; more are refused", group=LIMITS, least=1, per_model=True
    )
    max_state_mb: int = _field(
        256, "Most memory of the states of a model's sequences in MiB", group=LIMITS, least=1, per_model=True
    )
    sequence_timeout: float = _field(
        60.0,
        "Time without a request after which a sequence is dropped",
        group=LIMITS,
        above=0,
        duration=True,
        per_model=True,
    )
    cache: str | None = _field(
        None,
        "Memory per model for responses that are sent again to equal requests, such as 64MB",
        more="See [response cache](../guides/serve/response-cache.md).",
        group=MODELS,
        unset="none",
        pattern=r"\d+(\.\d+)? ?[KMGT]i?B",
        form="a size: 64MB, or 0MB for none",
        per_model=True,
        common=True,
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
        per_model=True,
    )
    engine_timeout: float | None = _field(
        None,
        "Longest time for one batch in the engine, after which its requests fail; 0 for no limit",
        more="See [engine calls that do not end](../concepts/isolation.md#engine-calls-that-do-not-end).",
        group=LIMITS,
        unset="50 times the expected time, at least 30s",
        least=0,
        most=86400,
        duration=True,
    )
    ready_delay: float = _field(
        0.0,
        "How long the server keeps serving at shutdown after it reports that it is not ready",
        more="See [shutdown](../guides/deploy/containers.md#shutdown).",
        group=LIMITS,
        least=0,
        most=3600,
        duration=True,
    )
    drain_timeout: float = _field(
        30.0,
        "How long requests in flight may take to finish at shutdown",
        group=LIMITS,
        least=0,
        duration=True,
        common=True,
    )
    canary: str | None = _field(
        None,
        "Shares of the requests in percent that a new version gets, step by step, before it takes over: 5,25,50",
        more="A step of 0 compares answers only. See [canary and shadow](../concepts/versions.md#canary-and-shadow).",
        group=CANARY,
        unset="it takes over at once",
        pattern=r"(100|\d{1,2}(\.\d+)?)(,(100|\d{1,2}(\.\d+)?))*",
        form="percentages: 5,25,50",
        per_model=True,
        file_only=True,
    )
    canary_every: float = _field(
        60.0,
        "Least time of a step",
        group=CANARY,
        least=0,
        duration=True,
        per_model=True,
        file_only=True,
    )
    canary_errors: float | None = _field(
        None,
        "Percent of the new version's requests that may fail before it is rolled back",
        group=CANARY,
        unset="no limit",
        least=0,
        most=100,
        per_model=True,
        file_only=True,
    )
    canary_drift: float | None = _field(
        None,
        "Percent of compared answers that may differ from the earlier version's before the new version is rolled back",
        group=CANARY,
        unset="no limit",
        least=0,
        most=100,
        per_model=True,
        file_only=True,
    )
    canary_latency: float | None = _field(
        None,
        "Highest ratio of the new version's p99 latency to the earlier version's before the new version is rolled back",
        group=CANARY,
        unset="no limit",
        above=0,
        per_model=True,
        file_only=True,
    )
    canary_tolerance: float = _field(
        0.01,
        "Largest error of an answer that does not differ, as a share of the largest value of the output",
        group=CANARY,
        least=0,
        per_model=True,
        file_only=True,
    )
    canary_compare: float = _field(
        10.0,
        "Percent of the requests that both versions answer, to be compared",
        group=CANARY,
        least=0,
        most=100,
        per_model=True,
        file_only=True,
    )
    canary_sticky: bool = _field(
        False,
        "Send all requests of a client to the same version",
        group=CANARY,
        per_model=True,
        file_only=True,
    )
    sticky_header: str | None = _field(
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
    record: Path | None = _field(
        None,
        "Record a share of the requests and responses, which are users' data, in this folder",
        more="See [recording requests](../guides/operate/management.md#recording-requests).",
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
    choice_time: float = _field(
        0.3,
        "How long each variant is timed per batch size, if timing is needed",
        group=EXPERT,
        above=0,
        most=60,
        duration=True,
        per_model=True,
    )
    derived_cache: bool = _field(
        True,
        "Keep packed weights of large models next to the store, where processes share them",
        more="See [large models](../guides/serve/serving.md#large-models).",
        group=EXPERT,
        per_model=True,
    )
