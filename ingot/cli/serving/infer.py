"""``ingot infer``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from ingot.cli.connection import ClientAccess, api_key, naming_key_options
from ingot.cli.options import with_options
from ingot.cli.output import note, print_json, stdout
from ingot.cli.serving import answers
from ingot.client.access import MAX_RESPONSE_MB
from ingot.errors import IngotError, InvalidArgument, NotFound, Unavailable, Unsupported, write_error
from ingot.report.units import counted
from ingot.tasks import GENERATING

if TYPE_CHECKING:
    from ingot.client.blocking import Client
    from ingot.tensors import Array


@dataclass(frozen=True, kw_only=True)
class Request:
    """The inputs of a request, and its parameters."""

    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="NAME=@file.npy, or NAME=\\[[1, 2], [3, 4]] as JSON; NAME=TEXT for texts and NAME=@FILE for "
            "pictures and sounds, of a model that takes them; repeatable.",
        ),
    ]
    version: Annotated[str, typer.Option(help="The model's version.", show_default="the highest")] = ""
    output_names: Annotated[
        list[str] | None, typer.Option("--output-name", help="Return only this output; repeatable.")
    ] = None
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            metavar="<name=value>",
            help="A parameter of the request, such as timeout=50000 (microseconds) or priority=1; repeatable.",
        ),
    ] = None
    timeout: Annotated[float, typer.Option(min=0.001, max=1e6, help="Seconds to wait for the response.")] = 60.0


@with_options
def infer(
    url: Annotated[str, typer.Argument(help="http://host:port or grpc://host:port; with TLS https:// or grpcs://.")],
    model: Annotated[str, typer.Argument(help="The model's name on the server.")],
    request: Request,
    access: ClientAccess,
    max_response_mb: Annotated[
        int, typer.Option(min=1, help="Largest response in MiB; larger ones are refused.")
    ] = MAX_RESPONSE_MB,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the outputs to this .npz file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outputs as JSON.")] = False,
) -> None:
    """Send a request to a served model and print the response, or each of several as it comes.

    The server can be any that has the Open Inference Protocol.

    Examples:

        ingot infer http://127.0.0.1:8000 digits --input image=@one.npy
        ingot infer http://127.0.0.1:8000 sst2 --input text='a fine film'
        ingot infer http://127.0.0.1:8000 vit --input image=@cat.jpg
        ingot infer grpc://127.0.0.1:8001 digits --input 'image=\\[\\[1, 2]]' --json
    """
    import numpy as np

    from ingot.client.blocking import Client
    from ingot.protocol.documents import DECOUPLED

    chosen = _parameters(request.parameters or [])
    key = api_key(access.key_file)
    if key is not None and not _is_private(url):
        note(f"the key is sent unencrypted to {url}: use https:// or grpcs://")
    with (
        naming_key_options(),
        Client(
            url,
            request.timeout,
            access.ca_file,
            key,
            access.cert_file,
            access.cert_key_file,
            max_response_mb=max_response_mb,
        ) as client,
    ):
        version, wanted = request.version, request.output_names or ()
        arrays = _inputs(client, model, version, request.inputs)
        if out is None and not as_json and _writes_text(client, model, version, arrays):
            for answer in _whole(client.stream(model, arrays, version=version, outputs=wanted, parameters=chosen)):
                [piece] = _plain(answer["text"]).reshape(-1).tolist()
                stdout().print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            stdout().print()
            return
        try:
            outputs = client.infer(model, arrays, version=version, outputs=wanted, parameters=chosen)
        except Unsupported:
            if out is not None or not client.metadata(model, version).get("properties", {}).get(DECOUPLED):
                raise
            for answer in _whole(client.stream(model, arrays, version=version, outputs=wanted, parameters=chosen)):
                _show(answer, as_json=as_json)
            return
    if out is not None:
        try:
            with out.open("wb") as file:  # numpy would add .npz to a name without it
                np.savez(file, **{name: _plain(array) for name, array in outputs.items()})
        except OSError as error:
            raise write_error(f"cannot write {out}", error) from error
        note(f"wrote {out}")
    else:
        _show(outputs, as_json=as_json)


def _whole(stream: Iterator[dict[str, Array]]) -> Iterator[dict[str, Array]]:
    """Yield the answers of a stream.

    Raises:
        Unavailable: the server ended the stream by an error, which then has no status.
        IngotError: the request failed.
    """
    count = 0
    try:
        for answer in stream:
            count += 1
            yield answer
    except IngotError as error:
        if type(error) is not IngotError:
            raise
        raise Unavailable(f"the stream ended after {counted(count, 'answer')}: {error}") from error


def _writes_text(client: Client, model: str, version: str, arrays: Mapping[str, Array]) -> bool:
    """Return whether a request is a prompt of a model that writes text, which comes in pieces."""
    return [*arrays] == ["text"] and client.metadata(model, version).get("properties", {}).get("task") in GENERATING


def _show(outputs: dict[str, Array], *, as_json: bool) -> None:
    """Print one answer."""
    import numpy as np

    if as_json:
        print_json({"outputs": {name: _plain(array).tolist() for name, array in outputs.items()}})
    elif (lines := answers.lines_of(outputs)) is not None:
        for line in lines:
            stdout().print(f"  {line}", markup=False, highlight=False)
    else:
        for name, array in outputs.items():
            stdout().print(f"{name} {array.dtype} {list(array.shape)}", markup=False, highlight=False)
            stdout().print(np.array2string(_plain(array), precision=4, threshold=200), markup=False, highlight=False)


def _is_private(url: str) -> bool:
    """Return whether what is sent to a server stays secret: by TLS, or on this machine."""
    from ingot.addresses import is_loopback

    parts = urlsplit(url)
    return parts.scheme in ("https", "grpcs") or is_loopback(parts.hostname or "")


def _inputs(client: Client, model: str, version: str, texts: list[str]) -> dict[str, Array]:
    from ingot.protocol.documents import raw_inputs

    inputs: dict[str, Array] = {}
    dtypes: dict[str, str] | None = None
    raw: dict[str, str] = {}
    text_inputs: set[str] = set()
    for name, value in _named(texts, "input", "NAME=@file.npy or NAME=[1, 2, 3]").items():
        file = Path(value[1:]).expanduser() if value.startswith("@") else None
        if file is not None and file.suffix == ".npy":
            inputs[name] = _read(file)
            continue
        if dtypes is None:
            metadata = client.metadata(model, version)
            described = raw_inputs(metadata.get("properties", {}))
            raw = {name: spec.dtype.value for name, spec in described.items()}
            tensors = metadata.get("inputs", [])
            dtypes = {spec["name"]: spec["datatype"] for spec in tensors} | raw
            lists = [spec["name"] for spec in tensors if len(spec["shape"]) == 1]
            # Inputs of texts and files whose value needs no JSON: raw inputs, and tensors of BYTES with a batch alone.
            text_inputs = {key for key, dtype in dtypes.items() if dtype == "BYTES" and (key in raw or key in lists)}
        if name in text_inputs:
            inputs[name] = _raw(name, value, file)
            continue
        if file is not None:
            inputs[name] = _read(file)
            continue
        if name not in dtypes:
            others = [each for each in dtypes if each not in raw]
            shown = f"{', '.join(raw)}, or the tensors {', '.join(others)}" if raw else ", ".join(others)
            raise InvalidArgument(f"unknown input '{name}'; the model's inputs are {shown}")
        example = '\'[["a","b"]]\'' if dtypes[name] == "BYTES" else "[[1,2]]"
        if name in raw and not value.startswith("["):
            value, example = f"[{value}]", "3"  # one for all items
        inputs[name] = _parse(name, value, dtypes[name], example)
    return inputs


def _raw(name: str, value: str, file: Path | None) -> Array:
    """Return one item: a text, or the content of a file; or several, as a JSON list of texts."""
    import numpy as np

    items: list[bytes] = []
    if file is not None:
        try:
            items = [file.read_bytes()]
        except OSError as error:
            raise NotFound(f"there is no readable file {file}") from error
    else:
        if len(value) < 256 and "\0" not in value and Path(value).is_file():
            note(f"note: '{value}' was sent as a text; write {name}=@{value} for the content of that file")
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
        texts = found if isinstance(found, list) else [value]
        if not all(isinstance(item, str) for item in texts):
            raise InvalidArgument(
                f"the list of input '{name}' has an element that is not a text; write {name}='[\"a\", \"b\"]', and a "
                "text that looks like a list as a list of one"
            )
        try:
            items = [item.encode() for item in texts]
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"a text is not valid Unicode: {error}") from error
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _named(texts: list[str], what: str, forms: str) -> dict[str, str]:
    """Return the values that are written ``name=value``, by name."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"'{text}' is not a valid {what}; write {forms}")
        if name in values:
            raise InvalidArgument(f"{what} '{name}' is given twice")
        values[name] = value
    return values


def _parameters(texts: list[str]) -> dict[str, str | float]:
    """Parse ``name=value``: numbers, true and false are read as JSON, anything else is text."""
    parameters: dict[str, str | float] = {}
    for name, value in _named(texts, "parameter", "NAME=VALUE, such as timeout=50000").items():
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = value
        parameters[name] = found if isinstance(found, bool | int | float) else value
    return parameters


def _read(path: Path) -> Array:
    import numpy as np

    from ingot.tensors.arrays import not_an_array

    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (ValueError, OSError, EOFError) as error:
        raise not_an_array(path, "a .npy file of a plain array", error) from error
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"{path} holds several arrays; save the one you mean with numpy.save")
    return array


def _parse(name: str, text: str, datatype: str, example: str) -> Array:
    from ingot.protocol import arguments, json_data

    dtype = arguments.datatype(name, datatype)
    try:
        return json_data.from_json(name, dtype, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the value of input '{name}' is not JSON: {error}; write {name}={example}, or {name}=@FILE for a .npy file"
        ) from error


def _plain(array: Array) -> Any:
    """Convert an array to a type that JSON and .npz can hold: bytes to text, bfloat16 to float32."""
    import numpy as np

    from ingot.tensors import DType

    dtype = DType.of(array)
    if dtype is DType.BYTES:
        return np.array([item.decode(errors="replace") for item in array.reshape(-1)]).reshape(array.shape)
    return array.astype(np.float32) if dtype is DType.BF16 else array
