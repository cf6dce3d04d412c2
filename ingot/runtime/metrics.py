"""The runtime's Prometheus metrics, with fast counters and histograms.

The help of each metric is also its entry in the reference, in Markdown. The counters of ``prometheus_client`` take a
lock and scan all buckets at every count, some 3 microseconds per request. Those of this module, whose values are in
counts.py, are updated by the event loop alone and rendered by the same registry.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ingot.runtime.counts import Count, Histogram
from ingot.runtime.machine.memory import resident
from ingot.runtime.machine.nvml import Gpus

_MODEL = ("model", "version")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LOAD_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Counts(Collector):
    """A counter with labels. ``name`` excludes the rendered suffix ``_total``."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry):
        self._description = (name, text, None, labels)
        self._children: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """Return the count for these label values; keep it where it is used often."""
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Count()
        return found

    def forget(self, *labels: str) -> None:
        """Drop what begins with these label values."""
        _forget(self._children, labels)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(*self._description)
        for labels, count in list(self._children.items()):
            family.add_metric(labels, count.value)
        yield family


class Histograms(Collector):
    """A histogram with labels; ``buckets`` are upper bounds in ascending order, without infinity."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, buckets: Sequence[float], registry: CollectorRegistry
    ):
        self._description = (name, text, None, None, labels)
        self._buckets = tuple(float(bound) for bound in buckets)
        self._children: dict[tuple[str, ...], Histogram] = {}
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        """Return the histogram for these label values; keep it where it is used often."""
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Histogram(self._buckets)
        return found

    def forget(self, *labels: str) -> None:
        """Drop what begins with these label values."""
        _forget(self._children, labels)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._description)
        for labels, histogram in list(self._children.items()):
            below, buckets = 0, []
            for bound, count in zip((*map(str, self._buckets), "+Inf"), histogram.counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric(labels, buckets, histogram.total)
        yield family


def _forget(children: dict[tuple[str, ...], Any], labels: tuple[str, ...]) -> None:
    for values in [each for each in children if each[: len(labels)] == labels]:
        del children[values]


def _open_files() -> int:
    """Return how many file descriptors the process has in use; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names suffice
    except OSError:
        return 0


class Metrics:
    """One registry per server, so that several servers in one process do not share counts."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counts = partial(Counts, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histograms, registry=self.registry)
        seconds = partial(histogram, buckets=_SECONDS)
        self.requests = counts(
            "ingot_requests",
            "Inference requests that named a model; `protocol` is `http`, `grpc` or `python` "
            "(RunningServer.infer); `code` is `ok`, a code of errors, or `cancelled`",
            (*_MODEL, "protocol", "code"),
        )
        self.errors = counts(
            "ingot_errors",
            "Error responses, including those to requests that could not be decoded or did not name a model",
            ("protocol", "code"),
        )
        self.request_seconds = seconds(
            "ingot_request_seconds", "From decoded request to response, queueing included", (*_MODEL, "protocol")
        )
        self.queue_seconds = seconds("ingot_queue_seconds", "Waiting for the engine", _MODEL)
        self.engine_seconds = seconds(
            "ingot_engine_seconds", "One engine call, including concatenating inputs and splitting outputs", _MODEL
        )
        self.stage_seconds = seconds(
            "ingot_stage_seconds",
            "The stages of an engine call: `join` (concatenating and padding the inputs), `compute` and `split` "
            "(the outputs)",
            (*_MODEL, "stage"),
        )
        self.step_seconds = seconds(
            "ingot_step_seconds",
            "One step before or after the graph, such as `tokenize`, for one request of raw inputs, "
            "`/tokenize` or `/decode`",
            (*_MODEL, "step"),
        )
        self.node_seconds = seconds(
            "ingot_pipeline_node_seconds",
            "One node of a pipeline for one request, with the time in its model's queue",
            (*_MODEL, "node"),
        )
        self.cut_tokens = counts(
            "ingot_cut_tokens", "Tokens that were cut from texts longer than the model accepts", _MODEL
        )
        self.cut_seconds = counter(
            "ingot_cut_seconds", "Seconds that were cut from the ends of sounds longer than the model hears", _MODEL
        )
        self.encode_seconds = seconds(
            "ingot_encode_seconds",
            "Encoding a response, in a thread too, and without compression; with `grpcio` and in streams of "
            "gRPC without the last step, from message to bytes",
            ("protocol",),
        )
        self.batch_size = histogram("ingot_batch_size", "Samples in one engine call", _MODEL, buckets=_SIZES)
        self.batch_requests = histogram("ingot_batch_requests", "Requests in one engine call", _MODEL, buckets=_SIZES)
        self.batches = counts(
            "ingot_batches",
            "Engine calls by what let the batch leave the queue: `full`; `memory` (more samples might exceed "
            "`max_call_mb`); `deadline` of a request in it; `linger` (an idle engine had waited for more "
            "requests); `idle` (nothing else waited)",
            (*_MODEL, "reason"),
        )
        self.memory_failures = counts(
            "ingot_batches_out_of_memory",
            "Batches for which there was too little memory, and whose halves ran separately",
            _MODEL,
        )
        self.lost_devices = gauge("ingot_lost_devices", "1 for a device that failed for good", ("device",))
        self.cpu_fallback = gauge(
            "ingot_model_cpu_fallback",
            "1 for a model that was placed on a GPU and runs on the CPU, since its engine could not use the GPU",
            _MODEL,
        )
        self.access_log_lines = counts(
            "ingot_access_log_lines", "Lines of the access log: `info`, or `error`", ("level",)
        )
        self.log_records_lost = counter(
            "ingot_log_records_lost",
            "Log records that were not written, as the reader of stderr stopped or its disk is full",
        )
        self.padding_elements = counts(
            "ingot_padding_elements",
            "Elements of inputs that may be padded, by kind: `real` or `padding`",
            (*_MODEL, "kind"),
        )
        self.batch_checks = counter(
            "ingot_batch_checks",
            "Requests of batches that ran again alone: `agreed`, `differed`, or `dropped`, not compared",
            (*_MODEL, "result"),
        )
        self.in_flight = gauge(
            "ingot_in_flight_requests", "Requests accepted and not answered yet, queued ones included", _MODEL
        )
        self.http_connections = gauge("ingot_http_connections", "Connections to the HTTP port")
        self.threads = gauge("ingot_threads", "Python's threads")
        self.threads.set_function(threading.active_count)
        self.started = gauge("ingot_start_time_seconds", "When the server started, in seconds since 1970")
        self.open_files = gauge("ingot_open_files", "File descriptors in use")
        self.open_files.set_function(_open_files)
        self.grpc_connections = gauge("ingot_grpc_connections", "Connections to the fast gRPC server")
        self.grpc_streams = gauge("ingot_grpc_streams", "Open calls of the fast gRPC server")
        self.traces = counter("ingot_traces", "Requests whose spans are exported")
        self.shared_regions = gauge(
            "ingot_shared_memory_regions", "Regions of shared memory that clients have registered"
        )
        self.grpc_faults = counter(
            "ingot_grpc_faults",
            "Streams and connections that the fast gRPC server ended because the client violated HTTP/2, by "
            "HTTP/2 error code, such as `protocol_error`; `enhance_your_calm` is a flood, `refused_stream` is "
            "too many concurrent calls",
            ("code",),
        )
        self.engine_ended = counter(
            "ingot_engine_calls_ended",
            "Engine calls that were ended: `limit`, they took too long; `memory`, the process grew too much; "
            "`abandoned`, no client waited for them any longer",
            (*_MODEL, "reason"),
        )
        self.event_loop_blocked = counter(
            "ingot_event_loop_blocked_seconds",
            "Seconds in which the server answered nothing, because something blocked its event loop for over a second",
        )
        self.resident_memory = gauge(
            "ingot_resident_memory_bytes", "Memory that the server holds, without engine processes"
        )
        self.resident_memory.set_function(resident)
        self.gpus = Gpus(self.registry)
        self.memory_returned = counter(
            "ingot_memory_returned_bytes", "Memory that ONNX Runtime kept for further calls, and that was given back"
        )
        self.out_of_files = counter(
            "ingot_out_of_files_seconds",
            "Seconds in which all file descriptors of the process were in use, so that it closed new "
            "connections without a response. The log records the start and the end; raise `ulimit -n`",
        )
        self.limited = counter(
            "ingot_limited",
            "Connections and requests refused by a limit on clients: `connections`, `in_flight` or `rate`",
            ("limit",),
        )
        self.auth_refused = counter(
            "ingot_auth_refused",
            "Requests refused for lack of access: `missing`, `malformed`, `unknown`, `expired`, `revoked`, "
            "`token` (not valid), `certificate` (without rights) or `scope`",
            ("reason",),
        )
        self.tls_refused = counter(
            "ingot_tls_refused",
            "TLS handshakes that failed: `certificate` (the client sent none, or one that is not valid), "
            "`client` (it did not accept the server's), `protocol` (no common version or cipher, or not TLS), "
            "`plain` (HTTP or gRPC without TLS). Not counted by `grpcio`",
            ("reason",),
        )
        self.reloads = counter(
            "ingot_reloads",
            "Files loaded again after a change, `auth` or `certificates`, by each process that accepts "
            "connections: `ok`, or `failed`, and the earlier content stays in use",
            ("file", "result"),
        )
        self.rollouts = counter(
            "ingot_rollouts",
            "Changes of the archive that answers: `ok`; `failed`, and the earlier one still answers; or `stopped`, if "
            "an operator stopped its canary",
            (*_MODEL, "result"),
        )
        self.server_info = gauge(
            "ingot_server_info",
            "1, with the version and build (`compiled` or `pure`) of Ingot and the server's name among replicas",
            ("version", "build", "replica"),
        )
        self.memory_budget = gauge("ingot_memory_budget_bytes", "The memory budget, by device", ("device",))
        self.model_memory = gauge(
            "ingot_model_memory_bytes",
            "Memory that a model took when it was loaded last, 0 while it is not in memory; without a memory "
            "budget it is not measured, but the size of the weights of its engines",
            (*_MODEL, "device"),
        )
        self.model_device_memory = gauge(
            "ingot_model_device_memory_bytes",
            "Memory of a model on a GPU: `planned`, its weights and the activations of its largest batch; "
            "`measured`, which its load took, warm-up included",
            (*_MODEL, "device", "kind"),
        )
        self.context_memory = gauge(
            "ingot_gpu_context_bytes",
            "Memory of a GPU that the server's process took to use it, before any model",
            ("device",),
        )
        self.model_loads = counter(
            "ingot_model_loads",
            "Loads at the `start`, for a request (`demand`) or as a new version (`rollout`)",
            (*_MODEL, "reason"),
        )
        self.load_seconds = histogram(
            "ingot_model_load_seconds",
            "Time of a load until the model is ready, in which others may have to leave",
            _MODEL,
            buckets=_LOAD_SECONDS,
        )
        self.model_evictions = counter("ingot_model_evictions", "How often a model left the memory for others", _MODEL)
        self.demand_waits = counter("ingot_demand_waits", "Requests that waited until their model was loaded", _MODEL)
        self.canary_requests = counter(
            "ingot_canary_requests",
            "Requests during a canary or shadow that the `current` model or the `candidate` got, `ok` or "
            "`failed`; counted from 0 for each candidate",
            (*_MODEL, "to", "result"),
        )
        self.canary_comparisons = counter(
            "ingot_canary_comparisons",
            "Compared answers that `agreed` or `differed`, and copies that were `dropped`; counted from 0 for "
            "each candidate",
            (*_MODEL, "result"),
        )
        self.canary_weight = gauge(
            "ingot_canary_weight_percent", "A candidate's share of the requests, while it is tried", _MODEL
        )
        self.canary_worst_error = gauge(
            "ingot_canary_worst_error",
            "Largest error of a candidate's answers, as a share of the largest value of the output",
            _MODEL,
        )
        self.canary_latency_ratio = gauge(
            "ingot_canary_latency_ratio", "p99 latency of a candidate over the current model's", _MODEL
        )
        self.audit_suppressed = counter(
            "ingot_audit_suppressed", "Refused requests left out of the audit log during a flood"
        )
        self.audit_lost = counter("ingot_audit_lost", "Lines of the audit log that could not be written")
        self.queued = gauge("ingot_queued_requests", "Requests waiting for the engine", _MODEL)
        self.queued_bytes = gauge(
            "ingot_queued_bytes", "Memory of the inputs of requests waiting for the engine", _MODEL
        )
        self.ready = gauge("ingot_model_ready", "1 while the model is ready, else 0", _MODEL)
        self.variant_info = gauge(
            "ingot_model_variant_info",
            "1 for the variant that is served, with the reason; absent for a bare file",
            (*_MODEL, "variant", "reason"),
        )
        self.signature_checks = counter(
            "ingot_signature_checks",
            "Models checked against the trust policy: `valid`, `refused`; if the policy does not require a "
            "signature, `unsigned`, `untrusted` (signed by others) or `invalid` (the signature is wrong); "
            "`unchecked` without a policy",
            (*_MODEL, "result"),
        )
        self.derived_cache = counter(
            "ingot_derived_cache",
            "Loads of large models, counted when their packed weights are in use: `hit`, they were in the "
            "cache; `built`, they were written to it; `failed`, the model was loaded without it",
            (*_MODEL, "result"),
        )
        self.engine_restarts = counter(
            "ingot_engine_restarts",
            "Engine processes that ended unexpectedly: a signal's name such as `SIGFPE`, `exit`, or `killed` by "
            "the server because a call did not end or an answer was invalid",
            (*_MODEL, "reason"),
        )
        self.management = counter(
            "ingot_management",
            "Actions of management clients: `load`, `unload`, `reload`, `canary` and `stop_canary`; the result is "
            "`ok`, `failed` if a reload left a model as it was, or the code of the error",
            ("action", "result"),
        )
        self.sequences = gauge("ingot_sequences", "Open sequences, whose states the server keeps", _MODEL)
        self.sequence_state_bytes = gauge(
            "ingot_sequence_state_bytes", "Memory of the states of open sequences", _MODEL
        )
        self.sequences_ended = counter(
            "ingot_sequences_ended",
            "Sequences that are over: `ended` by their client, `expired` without a request",
            (*_MODEL, "reason"),
        )
        self.tokens = counts(
            "ingot_tokens",
            "Tokens of decoders, by kind: `prompt`, which were read; `reused`, of beginnings of prompts that the cache "
            "held already; `answer`, which were chosen",
            (*_MODEL, "kind"),
        )
        self.first_token = seconds(
            "ingot_first_token_seconds", "From a request for tokens to the first one, queueing included", _MODEL
        )
        self.between_tokens = seconds("ingot_between_tokens_seconds", "From one token of an answer to the next", _MODEL)
        self.decoding_seconds = seconds(
            "ingot_decoding_seconds",
            "The stages of a decoder's step: `read` (parts of prompts, and what an encoder reads), `extend` (a token "
            "for each answer that has begun) and `choose` (the tokens, by their probabilities)",
            (*_MODEL, "stage"),
        )
        self.slots_in_use = gauge(
            "ingot_slots_in_use", "Requests for tokens that a decoder answers now, of at most `slots`", _MODEL
        )
        self.slots_bytes = gauge("ingot_slots_bytes", "Memory of a decoder's cache, of all slots", _MODEL)
        self.cache_hits = counts("ingot_cache_hits", "Requests that the response cache answered", _MODEL)
        self.cache_misses = counts("ingot_cache_misses", "Requests that the response cache had no response to", _MODEL)
        self.cache_evictions = counts(
            "ingot_cache_evictions", "Responses that the response cache dropped to make room", _MODEL
        )
        self.cache_bytes = gauge("ingot_cache_bytes", "Memory of the responses in the response cache", _MODEL)
        self.recorded = counter("ingot_recorded_requests", "Requests recorded to the folder of `--record`", _MODEL)
        self.recorded_dropped = counter(
            "ingot_recorded_dropped",
            "Selected requests that were not recorded: too many were waiting, or the folder was not writable",
            _MODEL,
        )

    def forget(self, model: str, version: str) -> None:
        """Drop the values of a model that never answered."""
        for each in vars(self).values():
            if isinstance(each, Counts | Histograms):
                each.forget(model, version)
            elif isinstance(each, Counter | Gauge):
                samples = [sample.labels for family in each.collect() for sample in family.samples]
                found = [one for one in samples if (one.get("model"), one.get("version")) == (model, version)]
                for labels in {tuple(one.values()) for one in found}:
                    each.remove(*labels)

    def render(self) -> bytes:
        """Return the text exposition."""
        return generate_latest(self.registry)
