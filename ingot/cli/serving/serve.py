"""``ingot serve``."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer

from ingot.cli import interrupts
from ingot.cli.completion import references
from ingot.cli.options import StoreOption
from ingot.cli.settings import ConfigOption, chosen, with_settings
from ingot.errors import InvalidArgument

if TYPE_CHECKING:
    from ingot.tensors import Array, Signature, TensorSpec


@with_settings
def serve(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="References of the store (digits:1, digits:1#fp32) or of a registry (oci://host/digits:1, which is "
            "pulled), archive files (./digits.ingot) or .onnx files; NAME=SOURCE serves one under another name. The "
            "models of the configuration file are served too.",
            autocompletion=references,
        ),
    ] = None,
    config: ConfigOption = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    store: StoreOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print addresses, models and changed settings as one line of JSON.")
    ] = False,
    **settings: Any,
) -> None:
    """Serve models over HTTP and gRPC until Ctrl-C or SIGTERM; requests in flight then finish. SIGHUP reloads models.

    Server settings can also be environment variables, INGOT_HTTP_PORT for --http-port and so on, or keys of the
    configuration file.

    Examples:

        ingot serve digits:1 digits-fp32=digits:1#fp32 --http-port 8080 --max-batch 128
        ingot serve --config ingot.toml
    """
    hangups = interrupts.Hangups()
    with _garbage_later() as loaded:
        from ingot.config.configuration import Configuration
        from ingot.model_store import Store
        from ingot.server.lifecycle import Server
        from ingot.server.main import create, run

        def read() -> Configuration:
            return Configuration.of(chosen(settings), config, options=True)

        configure_logging(log_level, read().server.log_format)

        server: Server = create(sources or (), Store(store), read, _transferring, ends_process=True)

        def started() -> None:
            loaded()
            if as_json:
                print(json.dumps(_addresses(server)), flush=True)
            else:
                print_addresses(server)

        interrupts.check()
        run(server, started, hangups)


_SHOWN_VALUES = 128
"""Values of an input that a command on the terminal may have."""
_SHOWN_BYTES = 4096
"""Length of the JSON in such a command, where an example may hold long texts."""
_RAW = "Inference-Header-Content-Length: 0"


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
    from ingot.cli.archives.transfers import transferring  # only if something is pulled

    return transferring(first, log=True)


def configure_logging(level: str, form: Literal["human", "json"] = "human") -> None:
    """Send log records of this level and above to stderr, as lines for people or as JSON.

    Raises:
        InvalidArgument: there is no such level.
    """
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise InvalidArgument(f"unknown log level '{level}'; use debug, info, warning or error")
    from ingot.server.observation import records  # which --help does not need

    records.configure(level.upper(), form)
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
    management = server.management.url if server.management is not None else ""
    return {
        "http": server.http_url,
        "grpc": server.grpc_url,
        "management": management,
        "torchserve": {} if server.torchserve is None else server.torchserve.urls,
        "settings": server.config.changed,
        "models": models,
    }


def print_addresses(server: Any) -> None:
    """Print the models, addresses and changed settings of a running server, and a command to try."""
    # With print: the first requests would wait while rich is imported.
    for model in server.repository:
        facts = ", ".join(dict.fromkeys(filter(None, (model.variant, model.device, _task(model)))))
        print(f"{model.name} version {model.version} ({facts}) is ready")
    if summary := server.config.summary:
        print(f"with  {summary}")
    print(f"HTTP  {server.http_url}\ngRPC  {server.grpc_url}")
    if server.management is not None and server.management.url:
        print(f"admin {server.management.url}")
    if server.torchserve is not None:
        print(f"TorchServe  {', '.join(f'{name} {url}' for name, url in server.torchserve.urls.items())}")
        if "management" not in server.torchserve.urls:
            print("TorchServe's management needs --auth, or --insecure for every program of this machine")
    if server.config.page:
        print(f"page  {server.http_url if server.config.shows_page else server.management.url}/ui")
    commands = [] if server.config.auth else [curl(server.http_url, model) for model in server.repository]
    if any(commands):
        print(f"try   {next(filter(None, commands))}")
    print("Ctrl-C stops", flush=True)


def _task(model: Any) -> str:
    if (generation := getattr(model, "generation", None)) is not None:
        return str(generation.task)
    return "" if model.steps is None else str(model.steps.task)


def curl(url: str, model: Any) -> str:
    """Return a curl command that a model answers; empty if that would be too long, or needs a certificate.

    The inputs are raw ones of a model with steps, and the first sample of the example of a model in Python. Others have
    their smallest sizes. One large input is sent as raw bytes.
    """
    signature, name = model.signature, quote(model.name, safe="")
    place = f"{url}/v2/models/{name}/infer"
    if model.repeat is not None or model.sequential or not url.startswith("http:"):
        return ""
    if getattr(model, "texts", None) is not None:
        body = json.dumps({"model": model.name, "prompt": "The film was"})
        return f"curl -s {url}/v1/completions -d {shlex.quote(body)}"
    if model.steps is not None:
        from ingot.cli.archives.steps import command

        return command(url, name, model.steps)
    sample = _first(model.example, signature)
    shapes = [[*sample[spec.name].shape] if sample else _smallest(spec.shape, signature) for spec in signature.inputs]
    if max(map(math.prod, shapes), default=0) > _SHOWN_VALUES:
        (spec, shape), *others = zip(signature.inputs, shapes, strict=True)
        free = [size for size in spec.shape if isinstance(size, str) and size != signature.batch]
        if model.streams is not None or others or free or spec.values is not None or spec.dtype.value == "BYTES":
            return ""
        size = math.prod(shape) * spec.dtype.numpy.itemsize
        return f"head -c {size} /dev/zero | curl -s {place} -H '{_RAW}' --data-binary @- -o -"
    try:
        tensors = [
            {"name": spec.name, "datatype": spec.dtype.value, "shape": shape, "data": _data(spec, shape, sample)}
            for spec, shape in zip(signature.inputs, shapes, strict=True)
        ]
    except InvalidArgument:  # of the example, such as bytes that are not UTF-8
        return ""
    content: dict[str, Any] = {"inputs": tensors}
    if model.streams is not None:  # flat JSON, in which a value may have a dimension less
        if any(len(tensor["shape"]) > 2 for tensor in tensors):
            return ""
        place = f"-N {url}/v2/models/{name}/generate_stream"
        content = {each["name"]: each["data"][0] if each["shape"] == [1] else each["data"] for each in tensors}
    body = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("'", "'\\''")
    return "" if len(body) > _SHOWN_BYTES else f"curl -s {place} -d '{body}'"


def _first(example: Mapping[str, Array], signature: Signature) -> dict[str, Array]:
    batched = {spec.name for spec in signature.inputs if signature.batch in spec.shape[:1]}
    return {name: array[:1] if name in batched else array for name, array in example.items()}


def _data(spec: TensorSpec, shape: Sequence[int], sample: Mapping[str, Array]) -> Any:
    if not sample:
        return [_value(spec)] * math.prod(shape)
    from ingot.protocol import json_data

    return json.loads(json_data.to_json(spec.name, spec.dtype, sample[spec.name]))


def _smallest(shape: Sequence[int | str], signature: Signature) -> list[int]:
    known = {name: max(1, found.low) for name, found in signature.ranges.items() if name != signature.batch}
    return [size if isinstance(size, int) else known.get(size, 1) for size in shape]


def _value(spec: TensorSpec) -> Any:
    """Return an allowed value: 1, which is also a divisor and the value of most masks that hides nothing, if it is."""
    if spec.dtype.value == "BYTES":
        return "1"
    low, high = (None, None) if spec.values is None else (spec.values.low, spec.values.high)
    nearest = max(1 if high is None else min(1, high), 1 if low is None else low)
    return bool(nearest) if spec.dtype.value == "BOOL" else nearest
