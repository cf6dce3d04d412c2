"""What the load generator sends: inputs from a file, or random ones that fit the model's signature."""

from __future__ import annotations

import math
import mimetypes
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from ingot.errors import InvalidArgument, NotFound
from ingot.model_store.format import goldens
from ingot.protocol import json_codec
from ingot.protocol.arguments import datatype
from ingot.protocol.documents import raw_inputs
from ingot.tensors import Array, DType
from ingot.tensors.arrays import not_an_array

# Distinct requests that are generated, and the most memory for them.
_GENERATED = 64
_MOST_BYTES = 64 << 20
# A larger request than gRPC can carry.
_LARGEST = 2 << 30
# Generated text and integers of inputs without a range of values.
_TEXT = b"the quick brown fox"
_INTEGERS = (0, 1)
# Words of generated prompts, and most tokens of their answers.
_WORDS, _TOKENS = 32, 64
_RANGE = re.compile(r"(-?\d{1,18})?\.\.(-?\d{1,18})?")


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The requests of a load, as inputs of the model or, for TorchServe, as bytes.

    Attributes:
        requests: sent in turn.
        samples: in each request; 1 for a model without a batch dimension.
        text: describes it in one line.
    """

    requests: tuple[Mapping[str, Array] | bytes, ...]
    samples: int
    text: str
    media: str = "application/octet-stream"


def payload(
    metadata: Mapping[str, Any], data: Path | None, shapes: Mapping[str, tuple[int, ...]], batch: int, seed: int
) -> Payload:
    """Return the requests for a model.

    Args:
        metadata: of the model, as its server returns it.
        data: a file of inputs: ``.npz`` with an array for each, ``.json`` with one body of the protocol or a list of
            them, or ``.safetensors`` as ``ingot serve --record`` writes it. Without one random inputs are made.
        shapes: of random inputs that have dynamic dimensions other than the first.
        batch: samples per request, if the first dimension is dynamic.
        seed: of random inputs.

    Raises:
        InvalidArgument: the file has another form, or a shape is missing.
        NotFound: there is no such file.
    """
    inputs = metadata.get("inputs", [])  # servers of plain Python models may not know them
    if not inputs and data is None:
        name = metadata.get("name", "the model")
        raise InvalidArgument(f"the server does not describe the inputs of '{name}': give requests with --data FILE")
    if data is not None:
        made, text = _from_file(data, inputs, batch, raw_inputs(metadata.get("properties", {}))), f"from {data.name}"
    else:
        made, text = _generated(inputs, metadata.get("properties", {}), shapes, batch, seed), "random values"
    first = next(iter(made[0].values()))
    samples = len(first) if first.ndim and _is_batched(inputs) else 1
    sizes = ", ".join(f"{name} {DType.of(array).value}{list(array.shape)}" for name, array in made[0].items())
    return Payload(requests=tuple(made), samples=samples, text=f"{sizes}, {text}")


def completions(model: str, data: Path | None, seed: int) -> Payload:
    """Return requests for streams of OpenAI's completions.

    Args:
        model: its name.
        data: a ``.json`` file with a body of ``/v1/completions``, or a list of them; the model and the stream are set
            here. Without one, prompts are of 32 random words, and answers of at most 64 tokens.
        seed: of random prompts.

    Raises:
        InvalidArgument: the file has another form.
        NotFound: there is no such file.
    """
    if data is None:
        random = np.random.default_rng(seed)
        words = _TEXT.decode().split()
        bodies: Any = [
            {"prompt": " ".join(random.choice(words, _WORDS)), "max_tokens": _TOKENS} for _ in range(_GENERATED)
        ]
        text = f"{_WORDS} random words, at most {_TOKENS} tokens"
    else:
        try:
            found = orjson.loads(_read(data))
        except orjson.JSONDecodeError as error:
            raise InvalidArgument(f"{data} is not JSON: {error}") from error
        bodies, text = found if isinstance(found, list) else [found], f"from {data.name}"
        if not bodies or not all(isinstance(body, dict) for body in bodies):
            raise InvalidArgument(f"{data} has to hold one body of /v1/completions, or a list of them")
    common = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    requests = tuple(orjson.dumps({**body, **common}) for body in bodies)
    return Payload(requests=requests, samples=1, text=text, media="application/json")


def raw(path: Path) -> Payload:
    """Return a file as the body of each request. Raises NotFound if it does not exist."""
    media = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Payload(requests=(_read(path),), samples=1, text=path.name, media=media)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error


def _from_file(
    path: Path, inputs: Sequence[Mapping[str, Any]], batch: int, raw_names: Iterable[str]
) -> list[Mapping[str, Array]]:
    raw = _read(path)
    names = {spec["name"] for spec in inputs}
    names |= {*raw_names} if names else set()
    if path.suffix == ".json":
        try:
            content = orjson.loads(raw)
        except ValueError as error:
            raise InvalidArgument(f"{path} is not JSON: {error}") from error
        bodies = content if isinstance(content, list) else [content]
        made: list[Mapping[str, Array]] = [
            json_codec.decode_request("", "", orjson.dumps(body), None)[0].inputs for body in bodies
        ]
    elif path.suffix == ".safetensors":
        made = [golden.inputs or golden.raw for golden in goldens.decode(raw)]
    elif path.suffix == ".npz":
        made = _sliced(path, inputs, batch)
    else:
        raise InvalidArgument(f"{path} is not a .npz, .json or .safetensors file")
    if not made:
        raise InvalidArgument(f"{path} holds no request")
    for item in made:
        if not item:
            raise InvalidArgument(f"{path} holds a request without inputs")
        if names and (unknown := sorted(set(item) - names)):
            raise InvalidArgument(f"{path} names '{unknown[0]}'; the model's inputs are {', '.join(sorted(names))}")
    return made


def _is_batched(inputs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the first dimension of all inputs is dynamic; it is if they are unknown."""
    return all(spec["shape"] and spec["shape"][0] == -1 for spec in inputs)


def _sliced(path: Path, inputs: Sequence[Mapping[str, Any]], batch: int) -> list[Mapping[str, Array]]:
    """Return the arrays of a file, cut along the first dimension if that is dynamic."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError) as error:
        raise not_an_array(path, "a .npz file of plain arrays", error) from error
    arrays = {spec["name"]: arrays[spec["name"]] for spec in inputs if spec["name"] in arrays} or arrays
    if not _is_batched(inputs):
        return [arrays]
    count = min((len(array) for array in arrays.values()), default=0)
    if count < batch:
        raise InvalidArgument(f"{path} holds {count} samples; --batch {batch} needs more")
    starts = range(0, count - batch + 1, batch)
    return [{name: array[start : start + batch] for name, array in arrays.items()} for start in starts]


def _generated(
    inputs: Sequence[Mapping[str, Any]],
    properties: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    batch: int,
    seed: int,
) -> list[Mapping[str, Array]]:
    names = [spec["name"] for spec in inputs]
    if unknown := sorted(set(shapes) - set(names)):
        raise InvalidArgument(f"--shape names '{unknown[0]}'; the model's inputs are {', '.join(names)}")
    full = {spec["name"]: shapes.get(spec["name"]) or _shape(spec, batch) for spec in inputs}
    random = np.random.default_rng(seed)
    size = sum(math.prod(shape) for shape in full.values()) * 8
    if size > _LARGEST:
        raise InvalidArgument(
            f"a request would have {size >> 30} GiB; give smaller sizes with --batch and --shape, or --data FILE"
        )
    count = max(1, min(_GENERATED, _MOST_BYTES // max(1, size)))
    return [
        {
            spec["name"]: _values(
                datatype(spec["name"], spec["datatype"]),
                full[spec["name"]],
                properties.get(f"values.{spec['name']}", ""),
                random,
            )
            for spec in inputs
        }
        for _ in range(count)
    ]


def _shape(spec: Mapping[str, Any], batch: int) -> tuple[int, ...]:
    shape = [int(size) for size in spec["shape"]]
    if shape and shape[0] == -1:
        shape[0] = batch
    elif batch != 1:
        raise InvalidArgument(f"--batch {batch}: the first dimension of input '{spec['name']}' is not dynamic")
    if -1 in shape:
        raise InvalidArgument(
            f"input '{spec['name']}' has the shape {spec['shape']}: give its sizes with "
            f"--shape {spec['name']}:{','.join(str(size if size > 0 else 16) for size in shape)}, or --data FILE"
        )
    return tuple(shape)


def _values(dtype: DType, shape: tuple[int, ...], values: str, random: np.random.Generator) -> Array:
    if dtype is DType.BYTES:
        made = np.empty(shape, dtype=object)
        made[...] = _TEXT
        return made
    numpy_type = dtype.numpy
    if np.issubdtype(numpy_type, np.integer):
        low, high = _bounds(values)
        return random.integers(low, high, shape, endpoint=True).astype(numpy_type)
    if numpy_type == np.bool_:
        return random.integers(0, 2, shape).astype(np.bool_)
    return random.random(shape).astype(numpy_type)


def _bounds(text: str) -> tuple[int, int]:
    """Return a range that the server's metadata states as ``0..4096``; a missing end is 1,000 values away.

    It has no negative values if 0 is allowed: they may be indices that are counted from an end.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return _INTEGERS
    low, high = match.groups()
    first = int(low) if low else min(0, int(high or 0) - 1000)
    last = int(high) if high else first + 1000
    return (max(first, 0) if last >= 0 else first, last) if first <= last else _INTEGERS
