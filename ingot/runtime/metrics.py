"""What the runtime counts, in Prometheus' terms. Every metric is described in docs/serving.md."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from ingot.runtime.tally import Counts, Spreads

_MODEL = ("model", "version")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """One registry, so that several servers in one process do not share counts."""

    CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counts(
            "ingot_requests", "Inference requests answered, by outcome", (*_MODEL, "protocol", "code"), registry
        )
        self.errors = Counts(
            "ingot_errors",
            "Answers that were errors, also to requests that could not be decoded or named no model",
            ("protocol", "code"),
            registry,
        )
        self.request_seconds = Spreads(
            "ingot_request_seconds",
            "Time from decoded request to answer, queueing included",
            (*_MODEL, "protocol"),
            _SECONDS,
            registry,
        )
        self.queue_seconds = Spreads(
            "ingot_queue_seconds", "Time a request waited for the engine", _MODEL, _SECONDS, registry
        )
        self.engine_seconds = Spreads(
            "ingot_engine_seconds",
            "Time of an engine call, joining and splitting included",
            _MODEL,
            _SECONDS,
            registry,
        )
        self.batch_size = Spreads("ingot_batch_size", "Rows in one engine call", _MODEL, _ROWS, registry)
        self.batch_requests = Spreads("ingot_batch_requests", "Requests in one engine call", _MODEL, _ROWS, registry)
        self.padding_elements = Counts(
            "ingot_padding_elements",
            "Elements of the inputs that may be padded, by kind: real, or padding to run requests in one call",
            (*_MODEL, "kind"),
            registry,
        )
        self.in_flight = Gauge(
            "ingot_in_flight_requests",
            "Requests taken and not answered yet, waiting ones included",
            _MODEL,
            registry=registry,
        )
        self.grpc_connections = Gauge(
            "ingot_grpc_connections", "Connections to the fast gRPC server", registry=registry
        )
        self.grpc_streams = Gauge("ingot_grpc_streams", "Calls that the fast gRPC server has open", registry=registry)
        self.grpc_faults = Counter(
            "ingot_grpc_faults",
            "Streams and connections that the fast gRPC server ended as the client broke HTTP/2, by its error code",
            ("code",),
            registry=registry,
        )
        self.out_of_files = Counter(
            "ingot_out_of_files_seconds",
            "Seconds in which all file descriptors of the process were in use, so that it took no connection",
            registry=registry,
        )
        self.queued = Gauge("ingot_queued_requests", "Requests that wait for the engine now", _MODEL, registry=registry)
        self.ready = Gauge("ingot_model_ready", "1 while the model answers, else 0", _MODEL, registry=registry)
        self.variant_info = Gauge(
            "ingot_model_variant_info",
            "1 for the variant of its archive that the model serves, and why it is this one",
            (*_MODEL, "variant", "reason"),
            registry=registry,
        )
        self.signature_checks = Counter(
            "ingot_signature_checks",
            "Models held against the trust policy, by what it found: valid, refused, unsigned, untrusted or invalid "
            "(the last three where no signature is asked for), or unchecked without a policy",
            (*_MODEL, "result"),
            registry=registry,
        )
        self.derived_cache = Counter(
            "ingot_derived_cache",
            "Loads of large models by what the derived cache had: hit, built, or failed",
            (*_MODEL, "result"),
            registry=registry,
        )
        self.fronts = Gauge(
            "ingot_fronts", "Front processes that listen; 0 where the server's own process does", registry=registry
        )
        self.front_restarts = Counter(
            "ingot_front_restarts", "Front processes that ended by themselves and were started again", registry=registry
        )
        self.recorded = Counter(
            "ingot_recorded_requests", "Requests written to the folder of --record", _MODEL, registry=registry
        )
        self.recorded_dropped = Counter(
            "ingot_recorded_dropped",
            "Requests that were to be recorded and were not, since too many waited or the folder could not be written",
            _MODEL,
            registry=registry,
        )

    def render(self) -> bytes:
        """Return the text exposition."""
        return generate_latest(self.registry)
