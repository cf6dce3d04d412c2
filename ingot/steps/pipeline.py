"""The declared steps of a model, and their execution around its graph."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ingot.errors import InternalError, InvalidArgument, NotFound
from ingot.steps.after.boxes import Boxes
from ingot.steps.after.classify import Classify
from ingot.steps.after.ctc import Ctc
from ingot.steps.after.dense import Dense
from ingot.steps.after.depth import Depth
from ingot.steps.after.entities import Entities
from ingot.steps.after.fill import Fill
from ingot.steps.after.masks import Masks
from ingot.steps.after.normalize import Normalize
from ingot.steps.after.pixel_classes import PixelClasses
from ingot.steps.after.pool import Pool
from ingot.steps.after.relabel import Relabel
from ingot.steps.after.segments import Segments
from ingot.steps.after.span import Span
from ingot.steps.after.text_boxes import TextBoxes
from ingot.steps.after.vectors import Vectors
from ingot.steps.bytes import Bytes
from ingot.steps.images.image import Image
from ingot.steps.item import ItemStep
from ingot.steps.sounds.audio import Audio
from ingot.steps.step import Apply, Files, Values
from ingot.steps.tokenize import Tokenize, Tokenizing
from ingot.tasks import form_of
from ingot.tensors import Array, DType, Signature, TensorSpec

AnyStep = Annotated[
    Tokenize
    | Image
    | Audio
    | Bytes
    | Pool
    | Dense
    | Normalize
    | Classify
    | Relabel
    | Ctc
    | Entities
    | Span
    | Fill
    | Vectors
    | Boxes
    | TextBoxes
    | Masks
    | Segments
    | PixelClasses
    | Depth,
    Field(discriminator="kind"),
]
"""All kinds; a new one is added here."""
_LABELLED = Classify | Boxes | Masks | Segments | Entities
StepTime = tuple[str, float, float]
"""The kind of a step, and when it began and ended, in seconds of ``time.perf_counter``."""
T = TypeVar("T")
Run = Callable[[Values], Values]
"""Runs the graph: its outputs from its inputs."""


# Raw inputs and answers, and steps on either side of the graph: each step that decodes items has processes.
_MOST_TENSORS, _MOST_STEPS = 64, 16


class Steps(BaseModel):
    """The steps of a model as ``serving.json`` has them: from raw inputs to tensors, and from outputs to answers.

    Attributes:
        task: what the model does, in Hugging Face's words, such as ``text-classification``.
        inputs: the raw inputs, whose first dimension is the number of items.
        optional: the raw inputs that a request may leave out.
        outputs: the answers, with the same first dimension.
        before: run in this order on raw inputs.
        after: run in this order on the graph's outputs; they read values of earlier steps too.
        max_items: items of one request.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    schema_version: Literal[1] = 1
    task: str
    inputs: tuple[TensorSpec, ...] = Field(max_length=_MOST_TENSORS)
    optional: tuple[str, ...] = ()
    outputs: tuple[TensorSpec, ...] = Field(max_length=_MOST_TENSORS)
    before: tuple[AnyStep, ...] = Field(max_length=_MOST_STEPS)
    after: tuple[AnyStep, ...] = Field((), max_length=_MOST_STEPS)
    max_items: int = Field(2048, ge=1, le=1 << 20)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the steps need."""
        return tuple(dict.fromkeys(name for step in (*self.before, *self.after) for name in step.files))

    @property
    def described(self) -> dict[str, str]:
        """The task and the raw interface as properties, for clients; tensors as in ``ingot export --input``.

        ``raw_files`` has the media types of inputs that are files, and ``raw_options`` the inputs of which one element
        may stand for all items, with the values that each accepts, none for any; both as JSON. ``max_tokens`` is the
        limit of a text, and ``answer_form`` one of :data:`ingot.tasks.FORMS`.
        """
        needed = [spec for spec in self.inputs if spec.name not in self.optional]
        others = [spec for spec in self.inputs if spec.name in self.optional]
        tensors = {"raw_inputs": needed, "raw_optional_inputs": others, "raw_outputs": self.outputs}
        listed = {name: "; ".join(map(str, specs)) for name, specs in tensors.items() if specs}
        limit = next((step.max_length for step in self.before if isinstance(step, Tokenize) and not step.stride), None)
        tokens = {} if limit is None else {"max_tokens": str(limit)}
        form = {"answer_form": self.answer_form} if self.answer_form else {}
        return {"task": self.task, **listed, **self._described_inputs(), **tokens, **form}

    def _described_inputs(self) -> dict[str, str]:
        steps = (*self.before, *self.after)
        found: dict[str, dict[str, Any]] = {
            "raw_files": {name: media for step in steps for name, media in step.media.items()},
            "raw_options": {name: [*step.choices.get(name, ())] for step in steps for name in step.shared},
        }
        # Steps may share inputs that this model does not have.
        return {
            key: json.dumps({name: value for name, value in each.items() if name in self.names})
            for key, each in found.items()
            if not self.names.isdisjoint(each)
        }

    @property
    def answer_form(self) -> str:
        """The form of the answers, of :data:`ingot.tasks.FORMS`; empty if none fits."""
        return form_of({spec.name: len(spec.shape) for spec in self.outputs})

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of classes that answers have; empty without any."""
        return next((step.labels for step in self.after if isinstance(step, _LABELLED)), ())

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the raw inputs."""
        return frozenset(spec.name for spec in self.inputs)

    def takes(self, names: Iterable[str]) -> bool:
        """Return whether a request with inputs of these names is one for the steps."""
        return not self.names.isdisjoint(names)

    def comparable(self, answers: Values) -> Values:
        """Return answers in a form that machines reproduce but for rounding, such as shares of pixels for PNG files."""
        for step in self.after:
            answers = step.comparable(answers)
        return answers

    def check(self, signature: Signature, files: Files | None = None) -> None:
        """Check that the steps and the graph fit together.

        Args:
            signature: the graph's signature.
            files: returns the content of a file by its name; None if they are not checked.

        Raises:
            InvalidArgument: a step or the graph needs a value that nothing before it makes; a name is taken or occurs
                twice; all raw inputs are optional, or one that a step needs; a step does not fit the graph's output,
                such as a classifier with more labels than logits; an answer has another type or size than declared.
        """
        raw, graph = [spec.name for spec in self.inputs], [spec.name for spec in signature.inputs]
        if taken := set(raw) & set(graph):
            raise InvalidArgument(f"'{taken.pop()}' is an input of the graph and of the steps; rename one of them")
        if set(raw) <= set(self.optional):
            raise InvalidArgument("the steps have no raw input that a request must have; make one of them required")
        self._check_names(raw)
        known: dict[str, TensorSpec | None] = dict.fromkeys(raw)
        _walk(self.before, known, files)
        _need(graph, known, "the graph")
        known.update({spec.name: spec for spec in signature.outputs})
        _walk(self.after, known, files)
        _need([spec.name for spec in self.outputs], known, "the answer")
        for declared in self.outputs:
            if (spec := known[declared.name]) is not None and not _fits(spec, declared):
                raise InvalidArgument(
                    f"the steps make '{spec}', but the answer is declared as '{declared}'; declare it as they make it"
                )

    def _check_names(self, raw: Sequence[str]) -> None:
        answers = [spec.name for spec in self.outputs]
        for what, names in {"inputs": raw, "optional": self.optional, "outputs": answers}.items():
            if len(set(names)) < len(names):
                raise InvalidArgument(f"a name occurs twice in the steps' {what}: {', '.join(names)}")
        if unknown := set(self.optional) - set(raw):
            raise InvalidArgument(f"optional names '{min(unknown)}', which is not an input of the steps; remove it")
        for step in self.before:
            if missing := set(step.reads) & set(self.optional):
                raise InvalidArgument(
                    f"step '{step.kind}' needs '{min(missing)}', which requests may leave out; remove it from optional"
                )

    def open(
        self, files: Files, signature: Signature, decoding: Callable[[ItemStep], Apply] | None = None
    ) -> OpenedSteps:
        """Return the steps ready to run.

        Args:
            files: returns the content of a file by its name.
            signature: the graph's signature.
            decoding: opens the steps that decode items, by default in this process.

        Raises:
            InvalidArgument: they do not fit the graph; see :meth:`check`.
            InvalidArchive: a file is damaged.
            Unsupported: a package is missing.
        """
        self.check(signature, files)
        before = tuple(
            (
                step.kind,
                decoding(step) if decoding and isinstance(step, ItemStep) and step.confined else step.open(files),
            )
            for step in self.before
        )
        after = tuple((step.kind, step.open(files)) for step in self.after)
        return OpenedSteps(self, signature, before, after)


def _walk(steps: Iterable[AnyStep], known: dict[str, TensorSpec | None], files: Files | None) -> None:
    for step in steps:
        _need(step.reads, known, f"step '{step.kind}'")
        step.check(known, files)
        known.update(step.made(known))


def _fits(spec: TensorSpec, declared: TensorSpec) -> bool:
    sizes = zip(spec.shape, declared.shape, strict=False)
    fixed = all(size == wanted for size, wanted in sizes if isinstance(size, int) and isinstance(wanted, int))
    return spec.dtype is declared.dtype and len(spec.shape) == len(declared.shape) and fixed


def _need(names: Iterable[str], known: Iterable[str], who: str) -> None:
    found = set(known)
    for name in names:
        if name not in found:
            raise InvalidArgument(f"{who} needs '{name}', which is not among: {', '.join(sorted(found))}")


class OpenedSteps:
    """Steps that are ready to run; immutable, for any number of threads.

    Args:
        config: the steps.
        signature: the graph's signature.
        before: the kind and the function of each step.
        after: the same.
    """

    def __init__(
        self,
        config: Steps,
        signature: Signature,
        before: tuple[tuple[str, Apply], ...],
        after: tuple[tuple[str, Apply], ...],
    ):
        self.config = config
        self.signature = signature
        self._before, self._after = before, after
        self._graph = {spec.name: spec.dtype.numpy for spec in signature.inputs}
        self._specs = {spec.name: spec for spec in config.inputs}
        self._shared = {name for step in (*config.before, *config.after) for name in step.shared}
        self._required = [name for name in self._specs if name not in config.optional]
        self._pictures = [step for step in config.before if isinstance(step, Image)]
        self._lengths = next((step.lengths for step in config.before if step.lengths), "")
        self._answers = {spec.name: spec for spec in config.outputs}

    def check(self, values: Values) -> int:
        """Check the raw inputs of a request, without looking at each item; return the number of items.

        Raises:
            InvalidArgument: an input is missing, unknown or empty, has the wrong type or shape, or has too many items.
        """
        known = ", ".join(f"'{name}'" for name in self._specs)
        for name in values:
            if name not in self._specs:
                tensors = ", ".join(f"'{tensor}'" for tensor in self._graph)
                raise InvalidArgument(
                    f"unknown input '{name}'; the model's raw inputs are {known}, and instead of all of these it takes "
                    f"{tensors}"
                )
        for name in self._required:
            if name not in values:
                raise InvalidArgument(f"input '{name}' is missing; the model's raw inputs are {known}")
        first = self._required[0]
        count = 0
        for name in (first, *values):
            array, spec = values[name], self._specs[name]
            if DType.of(array) is not spec.dtype or array.ndim != len(spec.shape):
                raise InvalidArgument(
                    f"input '{name}' is {DType.of(array).value} of {array.ndim} dimensions; send {spec.dtype.value} of "
                    f"{len(spec.shape)}, with one element for each item"
                )
            count = count or len(array)
            if not len(array):
                raise InvalidArgument(f"input '{name}' is empty; send one item or more")
            if len(array) > self.config.max_items:
                raise InvalidArgument(
                    f"input '{name}' has {len(array)} items, over the limit of {self.config.max_items}; divide the "
                    "request"
                )
            if len(array) != count and not (name in self._shared and len(array) == 1):
                raise InvalidArgument(f"input '{name}' has {len(array)} items, input '{first}' {count}")
        return count

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its steps, each once."""
        return tuple(dict.fromkeys(kind for kind, _ in (*self._before, *self._after)))

    @property
    def tokenizing(self) -> Tokenizing | None:
        """The step that reads texts; None without one."""
        return next((step for _, step in self._before if isinstance(step, Tokenizing)), None)

    def tokenized(self, work: Callable[[Tokenizing], T], times: list[StepTime]) -> T:
        """Return the result of other work of the step that reads texts.

        Args:
            work: the function.
            times: gets the time of the work as that of the step.

        Raises:
            NotFound: no step reads texts.
        """
        if (step := self.tokenizing) is None:
            raise NotFound("the model's steps have no tokenizer")
        began = time.perf_counter()
        found = work(step)
        times.append(("tokenize", began, time.perf_counter()))
        return found

    def prepare(self, values: Values, times: list[StepTime] | None = None) -> Values:
        """Run the steps before the graph; return all values so far.

        Args:
            values: the raw inputs, checked.
            times: gets the time of each step.

        Raises:
            InvalidArgument: an item is not valid; the message names the input and its index.
        """
        return _run(self._before, values, times)

    def tensors(self, values: Values) -> dict[str, Array]:
        """Return the graph's inputs from what :meth:`prepare` returns.

        Raises:
            InvalidArgument: a picture has a size that the graph does not take.
        """
        for step in self._pictures:
            step.check_sides(values[step.pixels], self.signature)
        return {name: values[name].astype(dtype, copy=False) for name, dtype in self._graph.items()}

    def lengths(self, values: Values) -> Array | None:
        """Return how many elements each row has before its padding, int[n], if a step has padded rows."""
        return values[self._lengths].sum(1) if self._lengths else None

    def finish(self, values: Values, outputs: Values, times: list[StepTime] | None = None) -> dict[str, Array]:
        """Run the steps after the graph; return the answers.

        Args:
            values: what :meth:`prepare` returned.
            outputs: the graph's outputs.
            times: as for :meth:`prepare`.

        Raises:
            InternalError: an answer is not what the archive declares, as clients would read it.
        """
        found = _run(self._after, {**values, **outputs}, times)
        return {name: _declared(spec, found[name]) for name, spec in self._answers.items()}

    def run(self, values: Values, run: Run) -> dict[str, Array]:
        """Answer raw inputs with a graph.

        Raises:
            InvalidArgument: an input or an item is not valid.
        """
        self.check(values)
        prepared = self.prepare(values)
        return self.finish(prepared, run(self.tensors(prepared)))


def _declared(spec: TensorSpec, array: Array) -> Array:
    """Return an answer, if it has the type and the sizes that the archive declares."""
    declared = len(spec.shape) == array.ndim and all(
        size == wanted or isinstance(wanted, str) for size, wanted in zip(array.shape, spec.shape, strict=True)
    )
    if not declared or DType.of(array) is not spec.dtype:
        kind = f"{DType.of(array).value} of shape {list(array.shape)}"
        raise InternalError(f"the answer '{spec.name}' is {kind}, but the archive declares {spec}; export it again")
    return array


def _run(steps: Iterable[tuple[str, Apply]], values: Values, times: list[StepTime] | None) -> Values:
    found: Mapping[str, Array] = values
    for kind, step in steps:
        began = time.perf_counter()
        found = {**found, **step(found)}
        if times is not None:
            times.append((kind, began, time.perf_counter()))
    return found
