"""``ingot serve``."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from ingot.cli import interrupts
from ingot.cli.archives import StoreOption
from ingot.errors import InvalidArgument
from ingot.server.config import ServerConfig
from ingot.server.settings import Setting


def serve(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="References of the store (digits:1, digits:1#fp32) or of a registry (oci://host/digits:1, which is "
            "pulled), archive files (./digits.ingot) or .onnx files; NAME=SOURCE serves one under another name."
        ),
    ],
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    store: StoreOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print addresses, models and changed settings as one line of JSON.")
    ] = False,
    **settings: Any,
) -> None:
    """Serve models over HTTP and gRPC until Ctrl-C, SIGTERM or SIGHUP; requests in flight then finish.

    Server settings can also be environment variables: INGOT_HTTP_PORT for --http-port, and so on.
    """
    configure_logging(log_level)
    with _garbage_later() as loaded:
        from ingot.model_store import Store
        from ingot.server.lifecycle import Server
        from ingot.server.main import create, run

        chosen = {name: value for name, value in settings.items() if value is not None}
        config = ServerConfig.of(chosen, options=True)
        server: Server = create(sources, Store(store), config, _transferring, ends_process=True)

        def started() -> None:
            loaded()
            if as_json:
                print(json.dumps(_addresses(server)), flush=True)
            else:
                _print_addresses(server)

        interrupts.check()
        run(server, started)


def _option(setting: Setting) -> inspect.Parameter:
    """Return the parameter of a setting's option; None leaves the variable or the default."""
    flags = [setting.option]
    if setting.default is True:
        flags = [f"{setting.option}/--no-{setting.option.removeprefix('--')}"]
    option = typer.Option(
        *flags,
        help=f"{setting.help}.",
        rich_help_panel=setting.group,
        show_default=setting.shown_default,
        metavar="<time>" if setting.duration else None,
    )
    kind = str if setting.duration else setting.kind
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _signature() -> inspect.Signature:
    """Return the signature of :func:`serve` with a parameter for each setting, as typer reads it."""
    *own, _ = inspect.signature(serve, eval_str=True).parameters.values()
    return inspect.Signature([*own, *map(_option, ServerConfig.settings().values())])


serve.__signature__ = _signature()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _garbage_later() -> Iterator[Callable[[], None]]:
    """Disable garbage collection until the yielded function is called, and exempt all that was loaded until then.

    Modules and models live as long as the server. Scanning them took a tenth of the time to start, and would delay all
    requests by 25 ms now and then.
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
    # With print: the first requests would wait while rich is imported.
    for model in server.repository:
        variant = f"{model.variant}, " if model.variant else ""
        print(f"{model.name} version {model.version} ({variant}{model.device}) is ready")
    if summary := server.config.summary:
        print(f"with  {summary}")
    print(f"HTTP  {server.http_url}\ngRPC  {server.grpc_url}\nCtrl-C stops", flush=True)
