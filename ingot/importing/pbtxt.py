"""``config.pbtxt``, in which Triton keeps what it knows of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ingot.errors import InvalidArgument
from ingot.importing.declared import Declared
from ingot.importing.members import inside
from ingot.importing.textproto import MAX_BYTES, Message, parse
from ingot.tensors import DType

CONFIG = "config.pbtxt"
_MAX_TENSORS = 1000
_MAX_RANK = 64
# Fields that say how Triton serves a model, and what does that here.
_SERVING = {
    "dynamic_batching": "ingot serve joins requests by itself",
    "instance_group": "see --instances and --device of ingot serve",
    "version_policy": "ingot serve takes the version that is named, or the highest",
    "optimization": "engines optimize as they load",
    "model_warmup": "ingot serve warms models up by itself",
    "parameters": "",
    "response_cache": "",
    "sequence_batching": "the model takes each request by itself, and clients send its control inputs",
    "model_transaction_policy": "each request has one answer",
    "model_operations": "",
    "ensemble_scheduling": "",
}
Kind = TypeVar("Kind", str, int)


@dataclass(frozen=True)
class Config:
    """What a configuration says of a model; ``backend`` is empty where it leaves that to the file's name."""

    backend: str = ""
    filename: str = ""
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


def read_config(root: Path, model: Path) -> Config:
    """Read a model's configuration; Triton does without one where the model's file tells enough.

    Raises:
        InvalidArgument: it is not of the format, or a link that leads out of ``root``.
    """
    path = model / CONFIG
    if not path.exists():
        return Config()
    if not inside(root, path).is_file():
        raise InvalidArgument(f"{path} is no regular file")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    return _config(parse(raw, str(path)), str(path))


def _config(message: Message, where: str) -> Config:
    most_rows = _one(message, "max_batch_size", 0, where)
    # Only in the newer form is the backend told apart from the format that it reads.
    backend = _one(message, "backend", "", where) or _one(message, "platform", "", where)
    inputs = tuple(_input(item, most_rows > 0, where) for item in _messages(message, "input", where))
    outputs = tuple(_one(item, "name", "", where) for item in _messages(message, "output", where))
    return Config(
        backend,
        _one(message, "default_model_filename", "", where),
        tuple(sorted(inputs, key=lambda item: _position(item.name))),
        tuple(sorted(outputs, key=_position)),
        tuple(_notes(message, most_rows)),
    )


def _input(message: Message, batched: bool, where: str) -> Declared:
    name = _one(message, "name", "", where)
    if not name:
        raise InvalidArgument(f"{where}: an input has no name")
    kind = _one(message, "data_type", "", where)
    try:
        dtype = DType.parse(kind.removeprefix("TYPE_"))
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: the data_type of the input '{name[:100]}' is '{kind[:100]}'") from error
    reshaped = _messages(message, "reshape", where)
    dims = reshaped[0].get("shape", []) if reshaped else message.get("dims", [])
    if len(dims) > _MAX_RANK or not all(isinstance(dim, int) and -1 <= dim < 1 << 63 for dim in dims):
        raise InvalidArgument(f"{where}: the dims of the input '{name[:100]}' are no sizes, or -1 for any")
    sizes = tuple(dim if isinstance(dim, int) and dim >= 0 else None for dim in dims)
    return Declared(name, dtype, sizes, batched)


def _position(name: str) -> tuple[int, str]:
    """Return a key that sorts names of PyTorch's convention, ``INPUT__0``, and leaves others in order."""
    _, mark, number = name.rpartition("__")
    return (int(number), name) if mark and number.isdecimal() and len(number) < 9 else (0, "")


def _notes(message: Message, most_rows: int) -> Iterator[str]:
    if most_rows > 0:
        yield f"max_batch_size {most_rows} is not taken over: ingot serve has --max-batch"
    for name, instead in _SERVING.items():
        if name in message:
            yield f"{name} is not taken over" + (f": {instead}" if instead else "")
    for item in message.get("input", []):
        if isinstance(item, Message) and "reshape" in item:
            name = str(item.get("name", [""])[0])[:100]
            yield f"the reshape of '{name}' is not taken over: clients must send what the model takes"


def _messages(message: Message, name: str, where: str) -> list[Message]:
    found = message.get(name, [])
    messages = [item for item in found if isinstance(item, Message)]
    if len(messages) < len(found) or len(found) > _MAX_TENSORS:
        raise InvalidArgument(f"{where}: '{name}' is no list of messages, of {_MAX_TENSORS} at most")
    return messages


def _one(message: Message, name: str, default: Kind, where: str) -> Kind:
    """Return a field's only value."""
    found = message.get(name, [default])
    value = found[-1] if found else default
    if not isinstance(value, type(default)):
        wanted = "a number" if isinstance(default, int) else "text"
        raise InvalidArgument(f"{where}: '{name}' is not {wanted}")
    return value
