"""Models on pictures in folders of transformers: the steps of their image processor, and what these must equal.

Here are the classifiers, and what all tasks on pictures share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ingot import foreign
from ingot.errors import InvalidArgument, missing_package
from ingot.export.program import quiet
from ingot.export.tasks.folder import Folder, Found, classes_of, labels_of
from ingot.steps import Described, Original, Values, image_classification
from ingot.steps.after.classify import Function
from ingot.steps.images.operations import CenterCrop, Operation, Pad, Quantize, Resize
from ingot.steps.images.pictures import drawn
from ingot.steps.images.processors import operations_of
from ingot.tensors.arrays import as_bytes

FILE = "preprocessor_config.json"
# Pictures whose values are compared, and those whose answers are; narrow ones are for the tests of the steps.
_HARD, _SAMPLES, _LEAST = 60, 50, 24
# Sizes for processors that keep the aspect ratio.
_MODERATE = ((64, 48), (37, 91), (500, 333), (225, 224), (97, 51), (256, 256), (301, 150), (400, 161))
# Pixels of the shorter side of the narrowest picture that the graph accepts, if the aspect ratio is kept.
_NARROWEST = 32
# Multiples of its step that a side has at least: a normalization of a single value has no result.
_CELLS = 2
# The longer side where it has no bound: in parts of the declared size, or in pixels where pictures keep their size.
_ASPECT, _LARGEST = 4, 2048

Answer = Callable[[Any, Values], Values]


def find_classifier(folder: Folder, *, named: bool) -> Found | None:
    """Return a classifier of pictures that has an image processor; see :func:`ingot.export.tasks.find`."""
    if not folder.architecture.endswith("ForImageClassification") or not (folder.path / FILE).is_file():
        if named:
            raise folder.needs("image-classification", f"a model ...ForImageClassification and {FILE}")
        return None
    return Found("image-classification", folder.why, folder.path, lambda module: describe(module, folder.path))


def describe(module: Any, folder: Path) -> Described:
    """Describe the steps of a classifier of pictures.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the processor does what no operation stands for, or Pillow is not installed.
    """
    processor = Processor(folder)
    config = module.config
    # As transformers' pipeline chooses it.
    several = config.problem_type == "multi_label_classification" or config.num_labels == 1
    function: Function = "sigmoid" if several else "softmax"
    if config.problem_type == "regression":
        function = "none"
    pixels: dict[str, Any] = {"pixels": "input_ids"} if isinstance(processor.operations[-1], Quantize) else {}
    described = image_classification(
        labels_of(config), operations=processor.operations, function=function, reference=processor.name, **pixels
    )
    return replace(described, original=processor.original(_answer(processor)), inputs=processor.inputs(config))


def _answer(processor: Processor) -> Answer:
    def answer(module: Any, values: Values) -> Values:
        rows = processor.pipeline("ImageClassificationPipeline", module)(
            processor.upright(values), top_k=module.config.num_labels
        )
        return classes_of(rows)

    return answer


class Processor:
    """The image processor of a folder with Pillow's backend, and the steps that do the same.

    Attributes:
        name: of its class, with the version of transformers.
        operations: what it does to one picture.

    Raises:
        InvalidArgument: the folder's processor cannot be loaded.
        Unsupported: the processor does what no operation stands for, or Pillow is not installed.
    """

    def __init__(self, folder: Path):
        import transformers

        self.own = _loaded(folder)
        self.kind = type(self.own).__name__.removesuffix("Pil").removesuffix("ImageProcessor")
        self.name = f"transformers {transformers.__version__} {type(self.own).__name__}"
        self.operations = operations_of(self.own)

    def inputs(self, config: Any, mask: str = "") -> tuple[str, ...]:
        """Return the graph's inputs for the sizes of the pictures that it makes; none if they have no bounds.

        Args:
            config: the model's configuration.
            mask: the name of the mask of padding; empty without one.
        """
        sides = sides_of(self.operations)
        if sides is None:
            return ()
        if isinstance(colours := self.operations[-1], Quantize):
            height, width = map(int, sides)
            return (f"input_ids:int64[batch,{height * width}]=0..{len(colours.colours) - 1}",)
        pixels = f"pixel_values:float32[batch,{getattr(config, 'num_channels', 3)},{','.join(map(str, sides))}]"
        names = ",".join(str(side).partition("=")[0] for side in sides)
        return (pixels, f"{mask}:int64[batch,{names}]=0..1") if mask else (pixels,)

    def pipeline(self, name: str, module: Any, **changes: Any) -> Any:
        """Return a pipeline of transformers with this processor; ``changes`` are methods that it gets."""
        import transformers

        kind: Any = type(name, (getattr(transformers, name),), changes)
        return kind(model=module, image_processor=self.own, device="cpu")

    def upright(self, values: Values) -> list[Any]:
        """Return the pictures of raw inputs as transformers loads them; see :func:`_upright`."""
        return [*map(_upright, values["image"].tolist())]

    def original(self, answer: Answer, *options: Mapping[str, Any], enlarged: int = 1) -> Original:
        """Return the work of transformers, with which the steps are compared.

        Args:
            answer: returns the answers.
            options: further inputs of the samples, which are divided among them.
            enlarged: how many times larger pictures of several sizes are drawn.
        """

        def prepare(values: Values) -> Values:
            return {
                name: np.asarray(value) for name, value in self.own(self.upright(values), return_tensors="np").items()
            }

        fixed = all(isinstance(side, int) for side in sides_of(self.operations) or (0,))
        sides: dict[str, Any] = {"least": _LEAST} if fixed else {"sizes": np.array(_MODERATE) * enlarged}
        items, samples = drawn(_HARD, **sides), drawn(_SAMPLES, seed=1, **sides)
        return Original(self.name, prepare, answer, [*_sets(items, fixed)], [*_sets(samples, fixed, options or ({},))])


def _sets(files: Iterable[bytes], together: bool, options: Sequence[Mapping[str, Any]] = ({},)) -> Iterator[Values]:
    """Yield raw inputs with all files, or with one if pictures get several sizes, divided among options."""
    found = [*files]
    for index, option in enumerate(options):
        chosen = found[index :: len(options)]
        for each in [chosen] if together else ([file] for file in chosen):
            types = {name: np.float32 if isinstance(value, float) else object for name, value in option.items()}
            given = {name: np.full(len(each), value, types[name]) for name, value in option.items()}
            yield {"image": as_bytes(each), **given}


def sides_of(operations: Iterable[Operation]) -> tuple[int | str, int | str] | None:
    """Return the height and width after operations, as numbers or as named ranges; None if they have no bounds."""
    found: tuple[int | str, int | str] | None = None
    for each in operations:
        if isinstance(each, CenterCrop) and not each.relative:
            found = int(each.height), int(each.width)
        elif isinstance(each, Pad):
            found = (each.height, each.width) if each.to == "size" else None
        elif isinstance(each, Resize) and each.rule == "exact":
            found = each.of((1, 1))
        elif isinstance(each, Resize):
            found = _ranges(each)
    return found


def _ranges(resize: Resize) -> tuple[str, str] | None:
    step = resize.multiple
    if resize.rule.startswith("bounded_edges"):
        least, most = min(max(_NARROWEST, _CELLS * step), resize.edge), resize.longest
    elif resize.rule == "closest":
        least, most = step, _ASPECT * max(resize.height, resize.width)
    elif resize.rule == "keep":
        least, most = max(_NARROWEST, step), _LARGEST
    else:
        return None
    ceil = step - 1 if resize.round_up else 0
    least, most = ((side + ceil) // step * step for side in (least, most))
    bounds = f"{least}..{most}" + (f":{step}" if step > 1 else "")
    return f"height={bounds}", f"width={bounds}"


def _loaded(folder: Path) -> Any:
    """Return the folder's processor with Pillow's backend."""
    import transformers

    try:
        import PIL  # noqa: F401 - transformers would load a processor that fails
    except ModuleNotFoundError as error:
        raise missing_package("pillow", "exporting a model with its image processor", "images") from error

    def unread(error: Exception) -> str:
        return f"the image processor in {folder} cannot be loaded: {foreign.one_line(error)}"

    with foreign.reported_as(InvalidArgument, unread), quiet():
        loader: Any = transformers.AutoImageProcessor  # whose methods have no types
        return loader.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)


def _upright(content: bytes) -> Any:
    """Return a picture as transformers loads it, but on white: its pipeline would show what transparency hides."""
    from PIL import Image, ImageOps
    from transformers.image_transforms import convert_to_rgb

    picture: Any = convert_to_rgb(ImageOps.exif_transpose(Image.open(BytesIO(content))), return_numpy=True)
    return Image.fromarray(picture)
