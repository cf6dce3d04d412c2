"""``config.pbtxt``: Triton's configuration of a model, in protobuf's text format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from ingot.errors import InvalidArgument
from ingot.importing.members import inside
from ingot.importing.record import Declared
from ingot.importing.triton_config_pb2 import DataType, ModelConfig, ModelInput
from ingot.report.text import one_line
from ingot.tensors import DType

CONFIG = "config.pbtxt"
# protobuf's parser takes a time that is quadratic in the length of a line: 1 MiB in one line takes two minutes.
_MAX_BYTES = 1 << 20
_MAX_LINE = 1 << 14
# protobuf's parser skips an unknown `steps: [{}]` but not `steps [{}]`, so the missing colons are added. The first
# group is what they must not be added to: strings and comments.
_MISSING_COLON = re.compile(r"""("(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|\#[^\n]*)|(?<=\w)(?=\s*\[)""")
_MAX_TENSORS = 1000
_MAX_RANK = 64
# Triton's settings of a server, and what replaces each here.
_SERVING = {
    "dynamic_batching": "ingot serve batches requests by itself",
    "instance_group": "see --instances and --device of ingot serve",
    "version_policy": "ingot serve loads the version that is named, or the highest",
    "optimization": "engines optimize as they load",
    "model_warmup": "ingot serve warms models up by itself",
    "parameters": "",
    "response_cache": "see --cache of ingot serve",
    "sequence_batching": "the model accepts each request by itself, and clients send its control inputs",
    "model_transaction_policy": "each request has one response",
    "model_operations": "",
    "ensemble_scheduling": "",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model's configuration; ``backend`` is empty if the model's file name decides."""

    backend: str = ""
    filename: str = ""
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_config(root: Path, model: Path) -> Config:
    """Read a model's configuration, which is optional: Triton can derive one from the model's file.

    Raises:
        InvalidArgument: the file is not a valid configuration, or is a link that leads out of ``root``.
    """
    path = model / CONFIG
    if not path.exists():
        return Config()
    if not inside(root, path).is_file():
        raise InvalidArgument(f"{path} is not a regular file")
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    return _config(_parse(raw, str(path)), str(path))


def _parse(raw: bytes, where: str) -> ModelConfig:
    if len(raw) > _MAX_BYTES:
        raise InvalidArgument(f"{where} is larger than {_MAX_BYTES >> 20} MiB")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{where} is not text: {error.reason} at byte {error.start}") from error
    if max(map(len, text.split("\n"))) > _MAX_LINE:
        raise InvalidArgument(f"{where} has a line of over {_MAX_LINE >> 10} KiB; break it into shorter ones")
    text = _MISSING_COLON.sub(lambda match: match[1] or ":", text)
    try:
        return text_format.Merge(text, ModelConfig(), allow_unknown_field=True)
    except text_format.ParseError as error:
        line = f", line {error.GetLine()}" if error.GetLine() else ""
        reason = str(error).rpartition("': ")[2]  # without the text of the line
        raise InvalidArgument(f"{where}{line}: {one_line(reason)}") from error
    except RecursionError as error:  # only unknown messages nest so deeply, and Python code skips those
        raise InvalidArgument(f"{where}: messages are nested too deeply") from error


def _config(message: ModelConfig, where: str) -> Config:
    if max(len(message.input), len(message.output)) > _MAX_TENSORS:
        raise InvalidArgument(f"{where} has over {_MAX_TENSORS} inputs or outputs")
    inputs = (_input(item, message.max_batch_size > 0, where) for item in message.input)
    return Config(
        # `backend` is the newer field; `platform` names a format as well.
        backend=message.backend or message.platform,
        filename=message.default_model_filename,
        inputs=tuple(sorted(inputs, key=lambda item: _position(item.name))),
        outputs=tuple(sorted((item.name for item in message.output), key=_position)),
        notes=tuple(_notes(message)),
    )


def _input(item: ModelInput, batched: bool, where: str) -> Declared:
    if not item.name:
        raise InvalidArgument(f"{where}: an input has no name")
    if item.data_type == DataType.TYPE_INVALID:
        raise InvalidArgument(f"{where}: the input '{item.name[:100]}' has no data_type")
    dtype = DType.parse(DataType.Name(item.data_type).removeprefix("TYPE_"))
    dims = item.reshape.shape if item.HasField("reshape") else item.dims
    if len(dims) > _MAX_RANK or any(dim < -1 for dim in dims):
        raise InvalidArgument(
            f"{where}: the dims of the input '{item.name[:100]}' must be at most {_MAX_RANK} sizes, or -1 for any size"
        )
    return Declared(item.name, dtype, tuple(dim if dim >= 0 else None for dim in dims), batched)


def _position(name: str) -> tuple[int, str]:
    """Return a key that sorts names of PyTorch's convention, ``INPUT__0``, and leaves others in order."""
    _, mark, number = name.rpartition("__")
    return (int(number), name) if mark and number.isdecimal() and len(number) < 9 else (0, "")


def _notes(message: ModelConfig) -> Iterator[str]:
    if message.max_batch_size > 0:
        yield f"max_batch_size {message.max_batch_size} is not imported: ingot serve has --max-batch"
    present = {field.name for field, _ in message.ListFields()}
    for name, instead in _SERVING.items():
        if name in present:
            yield f"{name} is not imported" + (f": {instead}" if instead else "")
    for item in message.input:
        if item.HasField("reshape"):
            yield f"the reshape of '{item.name[:100]}' is not imported: clients must send the model's own shape"
