"""``config.pbtxt``: Triton's configuration of a model, in protobuf's text format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import text_format

from ingot.errors import InvalidArgument
from ingot.importing import triton_settings
from ingot.importing.members import inside
from ingot.importing.record import Declared
from ingot.importing.triton_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput
from ingot.importing.triton_config_pb2 import ModelSequenceBatching as Sequences
from ingot.report.text import one_line
from ingot.tensors import DType

CONFIG = "config.pbtxt"
# protobuf's parser takes time quadratic in the length of a line: two minutes for a line of 1 MiB.
_MAX_BYTES = 1 << 20
_MAX_LINE = 1 << 14
# protobuf's parser skips an unknown `steps: [{}]` but not `steps [{}]`, so the missing colons are added. The first
# group matches strings and comments, which must stay as they are.
_MISSING_COLON = re.compile(r"""("(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|\#[^\n]*)|(?<=\w)(?=\s*\[)""")
_MAX_TENSORS = 1000
_MAX_RANK = 64
# Controls as `--states` names them.
_CONTROLS = {
    Sequences.Control.CONTROL_SEQUENCE_START: "@start",
    Sequences.Control.CONTROL_SEQUENCE_READY: "@ready",
    Sequences.Control.CONTROL_SEQUENCE_END: "@end",
    Sequences.Control.CONTROL_SEQUENCE_CORRID: "@id",
}


@dataclass(frozen=True)
class EnsembleStep:
    """A step of an ensemble.

    Attributes:
        model: the name of the step's model.
        version: the model's version; -1 for the highest.
        inputs: the ensemble's tensor that each input of the model reads.
        outputs: the ensemble's tensor that each output of the model is.
    """

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model's configuration.

    Attributes:
        backend: the name of the backend or platform; empty if the model's file name decides.
        filename: the name of the model's file; empty for the default.
        inputs: the declared inputs, with those that the server fills in.
        outputs: the declared outputs.
        states: an output or a control for each input that the server fills in; see
            :class:`ingot.runtime.dispatch.states.Control`.
        labels: the name of the file with the names of classes; empty for none.
        steps: the steps of an ensemble.
        notes: fields that are not imported, and why.
    """

    backend: str = ""
    filename: str = ""
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[Declared, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    labels: str = ""
    steps: tuple[EnsembleStep, ...] = ()
    notes: tuple[str, ...] = ()


def read_config(root: Path, model: Path) -> Config:
    """Read a model's configuration, which is optional: Triton can derive one from the model's file.

    Args:
        root: the model repository.
        model: the model's folder in the repository.

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
    batched = message.max_batch_size > 0
    inputs = [_tensor(item, "input", batched, where) for item in message.input]
    sequences = message.sequence_batching
    filled, states = _states(sequences, batched, where)
    outputs = [_tensor(item, "output", batched, where) for item in message.output]
    files = dict.fromkeys(item.label_filename for item in message.output if item.label_filename)
    unused = [f"the labels in {file[:100]} are not imported: a model has one list of labels" for file in [*files][1:]]
    return Config(
        # `backend` is the newer field; `platform` names a format as well.
        backend=message.backend or message.platform,
        filename=message.default_model_filename,
        inputs=_sorted([*inputs, *filled]),
        outputs=_sorted(outputs),
        states=states,
        labels=next(iter(files), ""),
        steps=tuple(
            EnsembleStep(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in message.ensemble_scheduling.step[:_MAX_TENSORS]
        ),
        notes=(*triton_settings.notes(message), *unused),
    )


def _tensor(item: ModelInput | ModelOutput, what: str, batched: bool, where: str) -> Declared:
    if not item.name:
        raise InvalidArgument(f"{where}: an {what} has no name")
    called = f"the {what} '{item.name[:100]}'"
    dims = _sizes(item.dims, called, where)
    inner = _sizes(item.reshape.shape, f"the reshape of {called}", where) if item.HasField("reshape") else None
    if isinstance(item, ModelOutput):
        return Declared(item.name, None, dims, batched, inner=inner)
    return Declared(
        item.name, _dtype(item.data_type, called, where), dims, batched, inner=inner, optional=item.optional
    )


def _dtype(value: DataType, called: str, where: str) -> DType:
    if value == DataType.TYPE_INVALID:
        raise InvalidArgument(f"{where}: {called} has no data_type")
    return DType.parse(DataType.Name(value).removeprefix("TYPE_"))


def _sizes(dims: Sequence[int], called: str, where: str) -> tuple[int | None, ...]:
    if len(dims) > _MAX_RANK or any(dim < -1 for dim in dims):
        raise InvalidArgument(f"{where}: the dims of {called} must be at most {_MAX_RANK} sizes, or -1 for any size")
    return tuple(dim if dim >= 0 else None for dim in dims)


def _states(sequences: Sequences, batched: bool, where: str) -> tuple[list[Declared], dict[str, str]]:
    """Return the inputs that Triton fills in, and the source of each: the name of an output, or a control."""
    declared: list[Declared] = []
    states: dict[str, str] = {}
    for item in sequences.control_input:
        called = f"the control input '{item.name[:100]}'"
        if len(item.control) != 1:
            raise InvalidArgument(f"{where}: {called} has {len(item.control)} controls, not one")
        states[item.name], dtype = _control(item.control[0], called, where)
        declared.append(Declared(item.name, dtype, (1,), batched, control=True))
    for state in sequences.state:
        called = f"the state '{state.input_name[:100]}'"
        if file := next((item.data_file for item in state.initial_state if item.data_file), ""):
            raise InvalidArgument(
                f"{where}: {called} begins with the content of {file[:100]}, and states begin with zeros here; let the "
                "model add the initial values, or remove initial_state"
            )
        states[state.input_name] = state.output_name
        dtype = _dtype(state.data_type, called, where)
        declared.append(Declared(state.input_name, dtype, _sizes(state.dims, called, where), batched))
    return declared, states


def _control(control: Sequences.Control, called: str, where: str) -> tuple[str, DType]:
    """Return a control as ``--states`` has it, and the datatype of its input."""
    kind = _CONTROLS[control.kind]
    if kind == "@id":
        return kind, _dtype(control.data_type, called, where)
    declared: tuple[tuple[DType, Sequence[float]], ...] = (
        (DType.INT32, control.int32_false_true),
        (DType.FP32, control.fp32_false_true),
        (DType.BOOL, control.bool_false_true),
    )
    for dtype, values in declared:
        if len(values) == 2:
            false, true = (f"{float(value):g}" for value in values)
            return kind if (false, true) == ("0", "1") else f"{kind}:{false}:{true}", dtype
    raise InvalidArgument(f"{where}: {called} has no two values, such as int32_false_true: [ 0, 1 ]")


def _sorted(tensors: Sequence[Declared]) -> tuple[Declared, ...]:
    return tuple(sorted(tensors, key=lambda tensor: _position(tensor.name)))


def _position(name: str) -> tuple[int, str]:
    """Return a sort key: names of PyTorch's convention, ``INPUT__0``, by number, others first and in their order."""
    _, mark, number = name.rpartition("__")
    return (int(number), name) if mark and number.isdecimal() and len(number) < 9 else (0, "")
