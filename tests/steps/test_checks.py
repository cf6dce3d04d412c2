"""Checks of steps before their first request: their fit to the graph, and the threads that they need."""

from __future__ import annotations

from contextlib import nullcontext
from io import BytesIO

import numpy as np
import pytest

from ingot import steps
from ingot.errors import InvalidArchive, InvalidArgument
from ingot.steps import Step
from ingot.steps.after.boxes import Boxes
from ingot.steps.after.classify import Classify
from ingot.steps.after.ctc import Ctc
from ingot.steps.after.dense import Dense
from ingot.steps.after.depth import Depth
from ingot.steps.after.entities import Entities
from ingot.steps.after.fill import Fill
from ingot.steps.after.masks import Masks
from ingot.steps.after.pool import Pool
from ingot.steps.after.segments import Segments
from ingot.steps.after.span import Span
from ingot.steps.after.text_boxes import TextBoxes
from ingot.steps.after.vectors import Vectors
from ingot.tensors import DType, Signature, TensorSpec
from tests.steps.bert import tokenizer_file


@pytest.mark.parametrize(
    ("step", "shape", "needed"),
    [
        (Pool(tokens="out"), (4,), "tokens, size"),
        (Vectors(tokens="out"), (4,), "tokens, size"),
        (Classify(logits="out"), (), "classes"),
        (Ctc(logits="out", tokens=("a",)), (1,), "frames, tokens"),
        (Entities(logits="out", labels=("a",)), (1,), "tokens, classes"),
        (Span(last="out"), (8, 2), "tokens"),
        (Fill(logits="out", mask_id=3), (9,), "tokens, vocabulary"),
        (Boxes(logits="out", labels=("a",)), (1,), "queries, classes"),
        (Boxes(boxes="out", labels=("a",)), (9, 5), "queries, 4"),
        (TextBoxes(probabilities="out"), (2, 8, 8), "1, height, width"),
        (Masks(logits="out", labels=("a",)), (8, 1), "classes, height, width"),
        (Segments(masks="out", labels=("a",)), (9, 64), "queries, height, width"),
        (Depth(depths="out"), (1, 8, 8), "height, width"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_outputs_of_other_shapes_are_refused_before_the_first_request(
    step: Step, shape: tuple[int, ...], needed: str
) -> None:
    known = {"out": TensorSpec("out", DType.FP32, ("batch", *shape))}
    given = ", ".join(["batch", *map(str, shape)])
    message = rf"step '{step.kind}' needs 'out' of the shape \[\w+, {needed}\], but it has \[{given}\]; name the "
    with pytest.raises(InvalidArgument, match=message):
        step.check({**dict.fromkeys(step.reads), **known})


def test_a_layer_for_other_vectors_is_refused_before_the_first_request() -> None:
    file = BytesIO()
    np.save(file, np.ones((2, 4), np.float32))
    described = steps.embedding(tokenizer_file(), 2, further=[Dense()], files={"dense.weight.npy": file.getvalue()})
    inputs = tuple(TensorSpec(name, DType.INT64, ("batch", "seq")) for name in ("input_ids", "attention_mask"))
    for size in (4, 5):
        output = TensorSpec("last_hidden_state", DType.FP32, ("batch", "seq", size))
        with pytest.raises(InvalidArchive, match="of 5 values, but 'dense") if size == 5 else nullcontext():
            described.steps.open(described.files.__getitem__, Signature(inputs, (output,)))


def test_steps_of_the_size_of_a_picture_run_in_threads() -> None:
    for step in (Masks(labels=("a",)), Segments(labels=("a",)), Depth(), TextBoxes()):
        assert step.elements_at_once == 0
