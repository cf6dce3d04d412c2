"""The settings as keyword arguments of :func:`ingot.serve`.

Written by scripts/settings_table.py from the fields of ServerConfig; do not edit.
"""

# ruff: noqa: E501
from __future__ import annotations

import os
from typing import Literal, TypedDict


class ServerSettings(TypedDict, total=False):
    """Durations are seconds, or texts with a unit, such as ``50ms``. docs/reference/settings.md has the limits.

    Examples:
        >>> settings: ingot.ServerSettings = {"http_port": 0, "grpc_port": 0, "max_batch": 32}
        >>> with ingot.serve("./net.ingot", **settings) as server:
        ...     server.models
        ['net']
    """

    host: str
    """Address to listen on; 0.0.0.0 for all IPv4 addresses, :: for IPv6."""
    http_port: int
    """HTTP port; 0 for any free port."""
    grpc_port: int
    """gRPC port; 0 for any free port."""
    share_port: bool
    """Let several servers of this user, each with this option, listen on both ports; the kernel distributes the connections."""
    grpc_server: Literal["fast", "grpcio"]
    """Which gRPC server: fast (our own) or grpcio (gRPC's own, which takes far more CPU)."""
    tls_cert: str | os.PathLike[str] | None
    """PEM file of a certificate and its chain; both ports then use TLS."""
    tls_key: str | os.PathLike[str] | None
    """PEM file of the certificate's key, without a password."""
    tls_client_ca: str | os.PathLike[str] | None
    """PEM file of the authorities of client certificates, which every connection then needs."""
    insecure: bool
    """Allow an address of other machines without TLS, or without keys or client certificates."""
    auth: str | os.PathLike[str] | None
    """File of the API keys that requests must have; it is read again when it changes."""
    cors_origin: str | None
    """Origins of web pages that may use the HTTP port, separated by commas; * for all, without keys."""
    allowed_host: str | None
    """Names of the HTTP port's host, separated by commas; requests to other names are refused."""
    shared_memory: str | None
    """Names of POSIX shared memory that clients may register, as shell patterns separated by commas; * for all."""
    access_log: Literal["off", "sampled", "slow", "all"]
    """Which requests are logged: off, sampled (some), slow (slow and failed ones) or all."""
    access_log_share: float
    """Share of the requests in the access log with --access-log sampled."""
    access_log_slow: float | str
    """Time from which a request is in the access log with --access-log slow."""
    log_format: Literal["human", "json"]
    """How log records are written to stderr: human (lines for people) or json (an object per line)."""
    replica: str | None
    """Name of this server among its replicas, in metrics and traces."""
    otlp: str | None
    """Address of an OpenTelemetry collector for traces: http://HOST:4318 or grpc://HOST:4317."""
    otlp_share: float
    """Share of the requests without a trace context that are traced."""
    log_control: bool
    """Let clients change what the server logs."""
    audit_log: str | os.PathLike[str] | None
    """Append refused requests and changes of keys and certificates to this file, as lines of JSON."""
    trust: str | os.PathLike[str] | None
    """Trust policy file: only archives that it trusts are served, with every blob's digest checked."""
    management: str | None
    """Where models are loaded and unloaded: a path of a Unix socket, HOST:PORT, or off."""
    management_grpc: str | None
    """HOST:PORT of management over gRPC, or off."""
    torchserve: bool
    """Also serve TorchServe's inference, management and metrics APIs, on its ports."""
    torchserve_ports: str
    """Ports of TorchServe's APIs: inference, management and metrics over HTTP, inference and management over gRPC; 0 for any free port."""
    page: bool
    """Show the server's models, load and latencies on a page at /ui."""
    watch: float | str | None
    """How often to poll registries for alias changes; those of the store take effect at once. off: follow no alias."""
    max_body_mb: int
    """Largest request in MiB, before and after decompression."""
    max_bodies_mb: int
    """Maximum size of request bodies held at once, in MiB; more are refused."""
    max_connections: int | None
    """Maximum number of open connections, of both protocols together; more are refused."""
    max_in_flight: int | None
    """Maximum number of unanswered requests per client; more are refused."""
    max_rate: float | None
    """Maximum number of requests per second and client; more are refused."""
    memory_budget: str | None
    """Most memory of models: 4GB, or by device cpu=4GB,cuda=8GB; models beyond it are loaded when a request comes."""
    engine_timeout: float | str | None
    """Longest time for one batch in the engine, after which its requests fail; 0 for no limit."""
    ready_delay: float | str
    """How long the server keeps serving at shutdown after it reports that it is not ready."""
    drain_timeout: float | str
    """How long requests in flight may take to finish at shutdown."""
    sticky_header: str | None
    """Header that names the client, for canary_sticky."""
    record: str | os.PathLike[str] | None
    """Record a share of the requests and responses, which are users' data, in this folder."""
    record_share: float
    """Share of the requests to record, chosen at random."""
    record_limit: int
    """Maximum number of requests recorded per model version."""
    record_limit_mb: int
    """Maximum size of the recording per model version, in MiB."""
    device: str
    """Where models run: cpu, cuda:0,1 for two GPUs, or auto, the least busy GPU with enough memory if there is one."""
    allow_code: bool
    """Load variants of formats that can run their author's code; ONNX cannot."""
    ort_library: str | os.PathLike[str] | None
    """A library of custom operators for ONNX Runtime."""
    isolate: Literal["auto", "all", "none"]
    """Which models run in separate processes: auto (those that are not proved harmless), all or none."""
    engine_memory_mb: int | None
    """Most private memory of an engine process, in MiB."""
    labels: str | os.PathLike[str] | None
    """File with the names of classes, a line for each, in the order of an output's values."""
    variant_choice: Literal["measured", "preferred"]
    """Which variant of an archive is served if none is named: measured (the fastest here) or preferred (the first that runs)."""
    verify_batches: float
    """Share of the batches whose requests run again, each alone, to compare the answers; 0 for none."""
    instances: int
    """Engines per model and device; they share the CPU cores."""
    lanes: int
    """Batches that an engine on a GPU has in flight, so that copies and computation overlap."""
    cuda_graphs: Literal["auto", "on", "off"]
    """Capture batches on a GPU as CUDA graphs: auto (PyTorch's engines), on (ONNX Runtime too) or off."""
    convolutions: Literal["auto", "default", "nhwc", "heuristic"]
    """How ONNX Runtime computes convolutions on a GPU: auto (the fastest of the others, measured at load), default, nhwc (channels last) or heuristic (shorter planning)."""
    gpu_arena: Literal["doubled", "exact"]
    """How ONNX Runtime's memory of a GPU grows: doubled, or exact (as much as a call needs)."""
    shards: int
    """Processes, each with its own GPU if there are any, over which one copy of a model is divided."""
    threads: int | None
    """CPU threads for one engine call."""
    max_batch: int
    """Maximum number of samples per engine call."""
    slo: float | str | None
    """Deadline of requests without a timeout, such as 50ms; requests that cannot meet it are refused."""
    max_delay: float | str | None
    """Longest time that an idle engine waits for more samples, such as 2ms; 0 for no wait."""
    max_queue: int
    """Maximum number of requests queued per model; more are refused."""
    max_queue_mb: int
    """Maximum size of queued requests per model, in MiB."""
    max_answer_mb: int
    """Largest outputs of one request, in MiB as raw tensors; a request that asks for more is refused."""
    max_call_mb: int | None
    """Most memory of one engine call in MiB; requests that need more are refused."""
    states: str | None
    """Inputs that the server keeps between the requests of a sequence, each with the output that is its next value."""
    repeat: str | None
    """Run the model again after each answer, with these inputs from outputs, and send each answer."""
    repeat_until: str | None
    """The BOOL output that is true in the last answer of a model with --repeat."""
    max_steps: int
    """Most answers to a request of a model with --repeat."""
    install_requirements: bool
    """Install the versions of packages that models in Python require, into separate folders."""
    permit: str | None
    """Permissions of models in Python, for those that ask for them: network, network-at-load, programs, write."""
    model_settings: str | None
    """Values that a model in Python gets as context.settings, as texts."""
    slots: int
    """Requests that a decoder, a model that generates tokens, answers at a time; others wait."""
    context: int | None
    """Most tokens of a request to a decoder, prompt and answer; each slot has memory for them."""
    prompt_delay: float | str
    """How long answers of a decoder may wait for a part of another request's prompt."""
    max_sequences: int
    """Most open sequences of a model; more are refused."""
    max_state_mb: int
    """Most memory of the states of a model's sequences in MiB."""
    sequence_timeout: float | str
    """Time without a request after which a sequence is dropped."""
    cache: str | None
    """Memory per model for responses that are sent again to equal requests, such as 64MB."""
    load_timeout: float | str
    """How long a model may take to load and to be tested and timed; 0 for no limit."""
    engine: str | None
    """Engine of all ONNX graphs: onnxruntime, openvino, tensorrt, or one of a plug-in."""
    choice_time: float | str
    """How long each variant is timed per batch size, if timing is needed."""
    derived_cache: bool
    """Keep packed weights of large models next to the store, where processes share them."""
    canary: str | None
    """Shares of the requests in percent that a new version gets, step by step, before it takes over: 5,25,50."""
    canary_every: float | str
    """Least time of a step."""
    canary_errors: float | None
    """Percent of the new version's requests that may fail before it is rolled back."""
    canary_drift: float | None
    """Percent of compared answers that may differ from the earlier version's before the new version is rolled back."""
    canary_latency: float | None
    """Highest ratio of the new version's p99 latency to the earlier version's before the new version is rolled back."""
    canary_tolerance: float
    """Largest error of an answer that does not differ, as a share of the largest value of the output."""
    canary_compare: float
    """Percent of the requests that both versions answer, to be compared."""
    canary_sticky: bool
    """Send all requests of a client to the same version."""
