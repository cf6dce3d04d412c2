"""``ingot serve``."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli import interrupts
from ingot.cli.archives import StoreOption
from ingot.errors import InvalidArgument

# The groups that --help shows the options in; those without one stand under its "Options".
_ADDRESSES = "Addresses"
_MODELS = "Models"
_BATCHING = "Batching (the defaults measure the model)"
_LIMITS = "Limits"
_RECORDING = "Recording requests"
_EXPERT = "For experts"


def serve(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="References of the store (digits:1, digits:1#fp32) or of a registry (oci://host/digits:1, which is "
            "pulled), archive files (./digits.ingot) or .onnx files; NAME=SOURCE serves one under another name."
        ),
    ],
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 is all.", rich_help_panel=_ADDRESSES, show_default="127.0.0.1"
        ),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="HTTP port; 0 is any free one.", rich_help_panel=_ADDRESSES, show_default="8000")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="gRPC port; 0 is any free one.", rich_help_panel=_ADDRESSES, show_default="8001")
    ] = None,
    grpc_server: Annotated[
        str | None,
        typer.Option(help="fast (our own) or grpcio (gRPC's own).", rich_help_panel=_ADDRESSES, show_default="fast"),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of a certificate: both ports then speak TLS.",
            rich_help_panel=_ADDRESSES,
            show_default="no TLS",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(help="PEM file of the certificate's key.", rich_help_panel=_ADDRESSES, show_default="no TLS"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_MODELS, show_default="auto")
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Load archives of formats that can run code of whoever made them; ONNX cannot.",
            rich_help_panel=_MODELS,
            show_default="False",
        ),
    ] = False,
    trust: Annotated[
        Path | None,
        typer.Option(
            help="A trust policy: serve only what it trusts, digests checked.",
            rich_help_panel=_MODELS,
            show_default="all is served",
        ),
    ] = None,
    ort_library: Annotated[
        Path | None,
        typer.Option(
            help="A library of custom operators for ONNX Runtime.", rich_help_panel=_MODELS, show_default="none"
        ),
    ] = None,
    variant_choice: Annotated[
        str | None,
        typer.Option(
            help="Which variant of an archive is served if none is named: measured (the fastest here) or preferred "
            "(the first).",
            rich_help_panel=_MODELS,
            show_default="measured",
        ),
    ] = None,
    instances: Annotated[
        int | None, typer.Option(help="Engines for each model.", rich_help_panel=_BATCHING, show_default="1")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads for one engine call.",
            rich_help_panel=_BATCHING,
            show_default="as many as pay",
        ),
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Most rows in one engine call.", rich_help_panel=_BATCHING, show_default="64")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="<time>",
            help="Time in which requests are to be answered, such as 50ms, at most 1h; later ones are refused.",
            rich_help_panel=_BATCHING,
            show_default="no limit",
        ),
    ] = None,
    max_delay: Annotated[
        str | None,
        typer.Option(
            metavar="<time>",
            help="The longest that an idle engine waits for more rows, such as 2ms; 0 is not at all.",
            rich_help_panel=_BATCHING,
            show_default="by the profile",
        ),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(help="Most requests that wait for a model.", rich_help_panel=_LIMITS, show_default="4096"),
    ] = None,
    max_queue_mb: Annotated[
        int | None,
        typer.Option(
            help="Most MiB that a model's waiting requests hold.", rich_help_panel=_LIMITS, show_default="256"
        ),
    ] = None,
    max_body_mb: Annotated[
        int | None, typer.Option(help="Largest request in MiB.", rich_help_panel=_LIMITS, show_default="64")
    ] = None,
    max_bodies_mb: Annotated[
        int | None,
        typer.Option(help="Most MiB of request bodies held at once.", rich_help_panel=_LIMITS, show_default="1024"),
    ] = None,
    load_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="<time>",
            help="How long a model may take to load and be tested, at most 24h; 0 is without a limit.",
            rich_help_panel=_LIMITS,
            show_default="5m",
        ),
    ] = None,
    ready_delay: Annotated[
        str | None,
        typer.Option(
            metavar="<time>",
            help="How long to go on answering at shutdown, while not ready.",
            rich_help_panel=_LIMITS,
            show_default="0s",
        ),
    ] = None,
    drain_timeout: Annotated[
        str | None,
        typer.Option(
            metavar="<time>",
            help="How long requests in flight may take to finish at shutdown.",
            rich_help_panel=_LIMITS,
            show_default="30s",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write some requests and their answers, which are users' data, to this folder.",
            rich_help_panel=_RECORDING,
            show_default="nothing is recorded",
        ),
    ] = None,
    record_share: Annotated[
        float | None,
        typer.Option(help="Which share of the requests is recorded.", rich_help_panel=_RECORDING, show_default="0.01"),
    ] = None,
    record_limit: Annotated[
        int | None,
        typer.Option(
            help="Most requests of a model's version that are recorded.",
            rich_help_panel=_RECORDING,
            show_default="1000",
        ),
    ] = None,
    record_limit_mb: Annotated[
        int | None,
        typer.Option(
            help="Most MiB of a model's version that are recorded.", rich_help_panel=_RECORDING, show_default="256"
        ),
    ] = None,
    frontends: Annotated[
        int | None,
        typer.Option(
            help="Processes that speak HTTP and gRPC, beside the one of the models; for many cores.",
            rich_help_panel=_EXPERT,
            show_default="0",
        ),
    ] = None,
    choice_time: Annotated[
        str | None,
        typer.Option(
            metavar="<time>",
            help="How long each variant is timed at each batch size, if it must be.",
            rich_help_panel=_EXPERT,
            show_default="300ms",
        ),
    ] = None,
    derived_cache: Annotated[
        bool | None,
        typer.Option(
            "--derived-cache/--no-derived-cache",
            help="Keep packed weights of large models beside the store, where processes share them.",
            rich_help_panel=_EXPERT,
            show_default="True",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    store: StoreOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print addresses, models and what is set as one line of JSON.")
    ] = False,
) -> None:
    """Serve models over HTTP and gRPC until Ctrl-C, SIGTERM or SIGHUP; requests in flight then finish.

    Settings of the server can also be given by variables: INGOT_HTTP_PORT for --http-port, and so on.
    """
    chosen: dict[str, Any] = {
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "frontends": frontends,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "grpc_server": grpc_server,
        "device": device,
        "allow_code": allow_code or None,  # so that the variable counts where the option is not given
        "trust": trust,
        "ort_library": ort_library,
        "variant_choice": variant_choice,
        "choice_time": choice_time,
        "derived_cache": derived_cache,
        "instances": instances,
        "threads": threads,
        "max_batch": max_batch,
        "slo": slo,
        "max_delay": max_delay,
        "max_queue": max_queue,
        "max_queue_mb": max_queue_mb,
        "max_body_mb": max_body_mb,
        "max_bodies_mb": max_bodies_mb,
        "load_timeout": load_timeout,
        "ready_delay": ready_delay,
        "drain_timeout": drain_timeout,
        "record": record,
        "record_share": record_share,
        "record_limit": record_limit,
        "record_limit_mb": record_limit_mb,
    }
    configure_logging(log_level)
    with _garbage_later() as loaded:
        from ingot.model_store import Store
        from ingot.server.config import ServerConfig
        from ingot.server.lifecycle import Server
        from ingot.server.main import create, run

        config = ServerConfig.of({key: value for key, value in chosen.items() if value is not None}, options=True)
        server: Server = create(sources, Store(store), config, _transferring)

        def started() -> None:
            loaded()
            if as_json:
                print(json.dumps(_addresses(server)), flush=True)
            else:
                _print_addresses(server)

        interrupts.check()
        run(server, started)


@contextlib.contextmanager
def _garbage_later() -> Iterator[Callable[[], None]]:
    """Collect no garbage until the yielded function is called, and never look again at what was loaded until then.

    Modules and models live as long as the server. Looking through them took a tenth of the time to start, and would
    hold up all requests for 25 ms every now and then.
    """

    def loaded() -> None:
        gc.freeze()
        gc.enable()

    gc.disable()
    try:
        yield loaded
    finally:
        gc.enable()


def _transferring(first: str) -> contextlib.AbstractContextManager[Any]:
    from ingot.cli.transfers import transferring  # only if something is pulled

    return transferring(first, log=True)


def configure_logging(level: str) -> None:
    """Send log records of this level and above to stderr.

    Raises:
        InvalidArgument: there is no such level.
    """
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise InvalidArgument(f"unknown log level '{level}'; use debug, info, warning or error")
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("httpx", "httpcore"):  # they log addresses, and a presigned one is a secret
        logging.getLogger(name).setLevel(logging.WARNING)


def _addresses(server: Any) -> dict[str, Any]:
    models = [
        {
            "name": model.name,
            "version": model.version,
            "variant": model.variant,
            "device": model.device,
            "properties": dict(model.properties),
        }
        for model in server.repository
    ]
    return {"http": server.http_url, "grpc": server.grpc_url, "settings": server.config.changed, "models": models}


def _print_addresses(server: Any) -> None:
    # By print, since the first requests wait while another module would be loaded to do it.
    for model in server.repository:
        variant = f"{model.variant}, " if model.variant else ""
        print(f"{model.name} version {model.version} ({variant}{model.device}) is ready")
    if told := server.config.told:
        print(f"with  {told}")
    print(f"HTTP  {server.http_url}\ngRPC  {server.grpc_url}\nCtrl-C stops", flush=True)
