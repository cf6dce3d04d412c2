"""TorchServe's default handlers as declared steps, proved equal to what the handlers compute.

Source: ts/torch_handler and ts/utils/util.py of https://github.com/pytorch/serve 0.12.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument, missing_package
from ingot.importing.recognition.form import Form
from ingot.importing.record import Declared, Imported
from ingot.runtime.engines.python.torchserve.ts.transforms import RESIZED, SIZE, imagenet
from ingot.steps import Described, Original, Values, image_classification, text_classification
from ingot.steps.after.pixel_classes import PixelClasses
from ingot.steps.images.image import Image
from ingot.steps.images.pictures import drawn
from ingot.steps.images.presets import classifier
from ingot.steps.tasks.described import described
from ingot.tensors import DType, TensorSpec
from ingot.tensors.arrays import as_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

CLASSIFIER, SEGMENTER = "image_classifier", "image_segmenter"
DECLARED = (CLASSIFIER, SEGMENTER)
"""The handlers that become steps."""
OPERATIONS = classifier(SIZE, resize=RESIZED)
OUT = "out"
LABELS = "index_to_name.json"
PIXELS = Declared("pixel_values", DType.FP32, (3, 224, 224), batched=True)
"""The input of a model that describes none."""
LOGITS = "logits"
# The fields of the step that makes the tokenizer's results.
_FIELDS = {"input_ids": "ids", "token_type_ids": "types"}
# Tokens of an example.
_TOKENS = 8
_TOP = 5
# Pictures in RGB whose values are compared, and those whose answers are.
_COMPARED, _ANSWERED = 60, 24


def describe(
    found: Imported, model: nn.Module | Path, inputs: Sequence[TensorSpec], output_names: Sequence[str]
) -> Described:
    """Describe the steps of an archive whose handler is one of :data:`DECLARED`.

    Args:
        found: what was read.
        model: its module, or the path of its graph.
        inputs: of the model.
        output_names: of the model; its only one has the logits.

    Raises:
        InvalidArgument: the model is not one that the handler accepts.
        Unsupported: Pillow is not installed.
    """
    if len(inputs) != 1 or inputs[0].shape[1:] != (3, SIZE, SIZE):
        shapes = ", ".join(map(str, inputs))
        raise InvalidArgument(
            f"the handler {found.handler} makes one input of the shape [batch,3,{SIZE},{SIZE}], but the inputs are "
            f"{shapes}; import the model alone with --without-handler"
        )
    [pixels] = inputs
    name = "data" if pixels.name == "image" else "image"
    options: dict[str, Any] = {"image": name, "pixels": pixels.name, "upright": False, "blends": False}
    reference = f"TorchServe's {found.handler}"
    if found.handler == SEGMENTER:
        _check_segmenter(model)
        image = Image(operations=OPERATIONS, reference=reference, **options)
        answer = TensorSpec(PixelClasses().output, DType.FP32, ("batch", SIZE, SIZE, 2))
        raw = TensorSpec(image.image, DType.BYTES, ("batch",))
        steps = described("image-segmentation", (raw,), image, (PixelClasses(logits=OUT),), (answer,))
        return replace(steps, original=_original(steps, reference, ()))
    logits, classes = logits_of(model, output_names)
    labels = labels_of(found.documents.get(LABELS), classes)
    steps = image_classification(
        labels, operations=OPERATIONS, logits=logits, top_k=_TOP, reference=reference, **options
    )
    return replace(steps, original=_original(steps, reference, () if isinstance(model, Path) else labels))


def describe_form(
    found: Imported, form: Form, model: nn.Module | Path, inputs: Sequence[TensorSpec], output_names: Sequence[str]
) -> Described:
    """Describe the steps of an archive with a custom handler of a known form.

    Args:
        found: what was read.
        form: what its handler does.
        model: its module, or the path of its graph.
        inputs: of the model; empty if none are declared.
        output_names: of the model; its only one has the logits.

    Raises:
        InvalidArgument: the model is not one that the handler accepts.
    """
    names = [spec.name for spec in inputs] or [*(form.inputs or (PIXELS.name,))]
    if len(names) != max(1, len(form.inputs)):
        raise InvalidArgument(
            f"the handler {found.handler} calls the model with {', '.join(form.inputs) or 'pictures'}, but its inputs "
            f"are {', '.join(names)}"
        )
    logits, classes = logits_of(model, output_names, _example(form))
    labels = labels_of(found.documents.get(LABELS), classes)
    options: dict[str, Any] = {"function": form.function, "top_k": form.best, "logits": logits}
    if form.tokens is not None:
        fields = dict(zip((_FIELDS.get(name, name) for name in form.inputs), names, strict=True))
        text: dict[str, Any] = {"pair": "", "text": form.part or "text", **form.tokens, **fields}
        steps = text_classification(found.tokenizer, labels, **text, **options)
        return replace(steps, inputs=tuple(f"{name}:int64[batch,seq]" for name in names))
    height, width = form.sides
    picture: dict[str, Any] = {
        "image": form.part or "image",
        "pixels": names[0],
        "upright": form.upright,
        "blends": False,
    }
    reference = f"the handler {found.handler}"
    steps = image_classification(labels, operations=form.operations, reference=reference, **picture, **options)
    return replace(steps, inputs=(f"{names[0]}:float32[batch,3,{height or 'height'},{width or 'width'}]",))


def _example(form: Form) -> Sequence[torch.Tensor]:
    """Return arguments of a model that a handler of a form calls."""
    import torch

    if form.tokens is not None:
        return [torch.ones(1, _TOKENS, dtype=torch.int64) for _ in form.inputs]
    return [torch.zeros(1, 3, *(side or SIZE for side in form.sides))]


def _check_segmenter(model: nn.Module | Path) -> None:
    """Check that a module returns a dictionary with planes of logits.

    Raises:
        InvalidArgument: it does not.
    """
    found = None if isinstance(model, Path) else _output(model)
    planes = found.get(OUT) if isinstance(found, dict) else None
    if planes is None or planes.ndim != 4 or planes.shape[2:] != (SIZE, SIZE):
        raise InvalidArgument(
            f"the handler {SEGMENTER} needs a module that returns a dictionary with '{OUT}' of the shape "
            f"[batch,classes,{SIZE},{SIZE}], which the model does not; import it alone with --without-handler"
        )


def _output(model: nn.Module, example: Sequence[torch.Tensor] | None = None) -> Any:
    """Return the outputs of a module for an example, by default a black picture."""
    import torch

    given = example or [torch.zeros(1, 3, SIZE, SIZE)]
    shapes = ", ".join(str([*each.shape]) for each in given)
    unfit = f"the model does not run on what the handler makes, tensors of the shape {shapes}"
    with foreign.reported_as(InvalidArgument, unfit), torch.no_grad():
        return model.eval()(*given)


def logits_of(
    model: nn.Module | Path, output_names: Sequence[str], example: Sequence[torch.Tensor] | None = None
) -> tuple[str, int]:
    """Return the name of the logits of a classifier, and their number of classes.

    Args:
        model: its module, or the path of its graph.
        output_names: given names of its outputs.
        example: arguments of the module; by default a black picture.

    Raises:
        InvalidArgument: it has other outputs.
    """
    if isinstance(model, Path):
        from ingot.runtime import EngineSpec, load_engine

        with contextlib.closing(load_engine(EngineSpec(model, device="cpu"))) as engine:
            outputs = engine.signature.outputs
        if len(outputs) == 1 and len(outputs[0].shape) == 2 and isinstance(outputs[0].shape[1], int):
            return outputs[0].name, outputs[0].shape[1]
    else:
        import torch

        found = _output(model, example)
        if isinstance(found, torch.Tensor) and found.ndim == 2 and len(output_names) <= 1:
            return (*output_names, LOGITS)[0], found.shape[1]
    raise InvalidArgument(
        "the handler needs one output of the shape [batch,classes], which the model does not have; "
        "import it alone with --without-handler"
    )


def labels_of(raw: bytes | None, classes: int) -> list[str]:
    """Return the names of classes in the three forms of ``index_to_name.json``; numbers for those without a name.

    Raises:
        InvalidArgument: the file has another form.
    """
    names: dict[str, Any] = {}
    if raw is not None:
        with foreign.reported_as(InvalidArgument, f"{LABELS} is not JSON"):
            names = json.loads(raw)
        listed = names.get("object_type_names") if isinstance(names, dict) else None
        names = {str(index): name for index, name in enumerate(listed)} if isinstance(listed, list) else names
    if not isinstance(names, dict):
        raise InvalidArgument(f'{LABELS} must be an object with a name for each class: {{"0": "cat", "1": "dog"}}')
    found = [names.get(str(index), str(index)) for index in range(classes)]
    texts = [each[-1] if isinstance(each, list) and each else each for each in found]
    if not all(isinstance(each, str) for each in texts):
        raise InvalidArgument(f"names in {LABELS} must be texts, or lists that end with one")
    return texts


def _original(steps: Described, reference: str, labels: Sequence[str]) -> Original:
    """Return the handler's own calls of Pillow and PyTorch, which the steps must equal.

    Args:
        steps: what is proved.
        reference: names the handler.
        labels: of the best classes; without any, answers are not compared.
    """
    try:
        import PIL
    except ModuleNotFoundError as error:
        raise missing_package("pillow", "the steps of a handler of pictures", "images") from error
    import torch

    [before] = steps.steps.before
    [name], pixels = before.reads, before.writes[0]

    def prepare(values: Values) -> Values:
        return {pixels: torch.stack([*map(_transformed, values[name].tolist())]).numpy()}

    def answer(module: Any, values: Values) -> Values:
        with torch.no_grad():
            scores = torch.softmax(module(torch.from_numpy(prepare(values)[pixels])), dim=1)
        best, classes = torch.topk(scores, min(_TOP, len(labels)), dim=1)
        names = np.array([label.encode() for label in labels], object)
        return {"label": names[classes.numpy()], "score": best.numpy()}

    pictures = [*drawn(_COMPARED, least=24, modes=("RGB",))]
    called = f"{reference} with Pillow {PIL.__version__}, torch {torch.__version__}"
    items, samples = ({name: as_bytes(each)} for each in (pictures, pictures[:_ANSWERED]))
    return Original(called, prepare, answer, [items], [samples], answers=bool(labels))


def _transformed(content: bytes) -> Any:
    """Return a picture as the handler makes it, float32[3, 224, 224]."""
    import PIL.Image

    return imagenet(PIL.Image.open(BytesIO(content)))
