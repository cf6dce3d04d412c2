"""The functions and methods of libraries that recognized handlers call: what each makes of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot import foreign
from ingot.errors import Unsupported
from ingot.importing.recognition.form import NOTHING, UNKNOWN, Form, Stage, Value, furthest
from ingot.steps.images.presets import torchvision_operations

Keywords = Mapping[str, Value]
Call = Callable[[Sequence[Value], Keywords], Value]


class NotKnown(Exception):
    """A call that has no equivalent among the declared steps; the text is the reason."""


# The parameters of torchvision's transforms, in their order.
_TRANSFORMS = {
    "Resize": ("size", "interpolation", "max_size"),
    "CenterCrop": ("size",),
    "ToTensor": (),
    "PILToTensor": (),
    "ConvertImageDtype": ("dtype",),
    "Normalize": ("mean", "std"),
}
# Calls that change neither the values of a sample nor their order.
SAME = {
    "BytesIO", "b64decode", "bytes", "bytearray", "list", "tuple", "stack", "cat", "unsqueeze", "squeeze", "to", "cuda",
    "cpu", "detach", "numpy", "tolist", "contiguous", "float", "copy", "enumerate", "reversed", "flatten", "eval",
}  # fmt: skip
# Calls without an effect on an answer, whatever they read.
INERT = {
    "print", "info", "debug", "warning", "error", "exception", "isinstance", "len", "type", "hasattr", "range", "time",
    "add_time", "add_counter", "add_metric", "add_size", "add_percent", "add_error", "append", "set_response_header",
}  # fmt: skip
NOTED = {*_TRANSFORMS, "softmax", "sigmoid", "topk", "map_class_to_label"}
"""What an import says that it has recognized."""
_IGNORED = ("return_tensors", "return_attention_mask", "return_token_type_ids", "pad_to_max_length", "padding")
# Options of a tokenizer whose values are those of the declared step.
_DEFAULTS = (("truncation", True), ("add_special_tokens", True), ("truncation", "longest_first"))
_IDS, _MASK = "input_ids", "attention_mask"


def call(name: str, values: Sequence[Value], keywords: Keywords) -> Value:
    """Return the result of a function or method by its last name; of a method the first value is its object.

    Raises:
        NotKnown: it is none of those that are known, and reads a value of a request.
    """
    if (known := _KNOWN.get(name)) is not None:
        return known(values, keywords)
    if name in _TRANSFORMS:
        return _transform(name, values, keywords)
    if name in INERT:
        return UNKNOWN
    first = furthest([*values, *keywords.values()])
    if name in SAME:
        return first
    if first.followed:
        raise NotKnown("")
    return UNKNOWN


def apply(callee: Value, values: Sequence[Value], keywords: Keywords) -> Value:
    """Return the result of calling transforms, a tokenizer or a model.

    Raises:
        NotKnown: it does not take these values.
    """
    first = furthest([*values, *keywords.values()])
    if callee.stage is Stage.TRANSFORMS and first.stage in (Stage.PICTURE, Stage.PIXELS):
        operations = (*first.form.operations, *callee.form.operations)
        return Value(Stage.PIXELS, form=replace(first.form, operations=operations))
    if callee.stage is Stage.TOKENIZER and first.stage in (Stage.TEXT, Stage.RAW):
        return _tokens(first, keywords)
    if callee.stage is Stage.MODEL and first.stage in (Stage.PIXELS, Stage.TOKENS):
        given = (*values, *keywords.values())
        inputs = tuple(str(each.content) for each in given if each.stage is Stage.TOKENS and each.content)
        default = (_IDS, _MASK) if first.stage is Stage.TOKENS else ()
        return Value(Stage.LOGITS, form=replace(first.form, inputs=inputs or default))
    raise NotKnown("")


def _opened(values: Sequence[Value], keywords: Keywords = NOTHING) -> Value:
    """Return the picture of a file: what Pillow's ``open`` makes.

    Raises:
        NotKnown: it is not a file of a request.
    """
    first = furthest(values)
    if first.stage is Stage.PICTURE:
        return first
    if first.stage is not Stage.RAW:
        if not first.followed:
            return UNKNOWN
        raise NotKnown("")
    return replace(first, stage=Stage.PICTURE)


def _transform(name: str, values: Sequence[Value], keywords: Keywords) -> Value:
    given = dict(zip(_TRANSFORMS[name], values, strict=False)) | {**keywords}
    attributes: dict[str, Any] = {"interpolation": "bilinear"} | {
        key: _plain(each) for key, each in given.items() if key != "antialias"
    }
    try:
        part = type(name, (), attributes)()
        with foreign.reported_as(Unsupported, f"the arguments of {name} are not constants"):
            operations = tuple(torchvision_operations(part))
    except Unsupported as error:
        raise NotKnown(str(error)) from error
    return Value(Stage.TRANSFORMS, form=Form(operations=operations))


def _plain(value: Value) -> Any:
    """Return a constant, or the last part of a name in lower case, such as ``bicubic`` of an interpolation."""
    if value.stage is Stage.CONSTANT:
        return value.content
    return str(value.content).rpartition(".")[2].lower() if value.content else None


def _compose(values: Sequence[Value], keywords: Keywords) -> Value:
    found = [each for value in (*values, *keywords.values()) for each in (value.content or ())]
    if not found or any(each.stage is not Stage.TRANSFORMS for each in found):
        raise NotKnown("a transform is not known")
    return Value(Stage.TRANSFORMS, form=Form(operations=tuple(op for each in found for op in each.form.operations)))


def _tokens(first: Value, keywords: Keywords) -> Value:
    options = {name: each.content for name, each in keywords.items() if name not in _IGNORED and each.stage > 0}
    options = {name: value for name, value in options.items() if (name, value) not in _DEFAULTS}
    if unknown := options.keys() - {"max_length"}:
        raise NotKnown(f"the option {min(unknown)} of a tokenizer")
    tokens = {**(first.form.tokens or {}), **options}
    return Value(Stage.TOKENS, form=replace(first.form, tokens=tokens))


def _converted(values: Sequence[Value], keywords: Keywords) -> Value:
    if values[0].stage is Stage.PICTURE and values[1:] and values[1].content == "RGB":
        return values[0]
    raise NotKnown("")


def _decoded(values: Sequence[Value], keywords: Keywords) -> Value:
    first = values[0]
    return replace(first, stage=Stage.TEXT) if first.stage is Stage.RAW else first


def _lowered(values: Sequence[Value], keywords: Keywords) -> Value:
    first = values[0]
    if first.stage not in (Stage.TEXT, Stage.RAW):
        return UNKNOWN
    return Value(Stage.TEXT, form=replace(first.form, tokens={"lower": True}))


def _turned(values: Sequence[Value], keywords: Keywords) -> Value:
    first = _opened(values)
    return replace(first, form=replace(first.form, upright=True))


def _scores(function: Any) -> Call:
    def call(values: Sequence[Value], keywords: Keywords) -> Value:
        first = furthest(values)
        if first.stage is not Stage.LOGITS:
            raise NotKnown("")
        return Value(Stage.SCORES, form=replace(first.form, function=function))

    return call


def _best(values: Sequence[Value], keywords: Keywords) -> Value:
    first, count = values[0], keywords.get("k", values[1] if len(values) > 1 else UNKNOWN).content
    if first.stage not in (Stage.LOGITS, Stage.SCORES) or not isinstance(count, int) or count < 1:
        raise NotKnown("the number of classes is not a constant")
    scores = Value(Stage.SCORES, form=replace(first.form, best=count))
    return replace(scores, content=(scores, replace(scores, stage=Stage.CLASSES)))


def _answered(values: Sequence[Value], keywords: Keywords) -> Value:
    scores, *others = (*values, *keywords.values())
    if scores.stage not in (Stage.LOGITS, Stage.SCORES):
        raise NotKnown("")
    if bool(scores.form.best) != any(each.stage is Stage.CLASSES for each in others):
        raise NotKnown("the best classes, without their numbers")
    return Value(Stage.ANSWER, form=scores.form)


def _model(values: Sequence[Value], keywords: Keywords) -> Value:
    return Value(Stage.MODEL)


def _pretrained(values: Sequence[Value], keywords: Keywords) -> Value:
    kind = str(values[0].content or "") if values else ""
    return Value(Stage.TOKENIZER if "Tokenizer" in kind else Stage.MODEL)


def _names(values: Sequence[Value], keywords: Keywords) -> Value:
    if furthest(values).followed:
        raise NotKnown("")
    return Value(Stage.NAMES)


_KNOWN: Mapping[str, Call] = {
    "Compose": _compose,
    "Sequential": _compose,
    "from_pretrained": _pretrained,
    "_load_torchscript_model": _model,
    "load": _names,
    "load_label_mapping": _names,
    "open": _opened,
    "exif_transpose": _turned,
    "convert": _converted,
    "decode": _decoded,
    "lower": _lowered,
    "softmax": _scores("softmax"),
    "sigmoid": _scores("sigmoid"),
    "topk": _best,
    "map_class_to_label": _answered,
}
