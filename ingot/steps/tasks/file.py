"""The steps of the task that distinguishes types of files, as the export describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ingot.steps.after.classify import Classify
from ingot.steps.after.relabel import Relabel
from ingot.steps.bytes import Bytes
from ingot.steps.tasks.described import BATCH, Described, best_classes, described, split
from ingot.tensors import DType, TensorSpec


def file_classification(
    labels: Sequence[str], *, logits: str = "target_label", max_items: int = 256, **options: Any
) -> Described:
    """Describe the steps of a classifier of files by their bytes, as magika's model is.

    Examples:
        >>> steps = ingot.steps.file_classification(["png", "python"], texts=["python"], first=512, last=512)
        >>> archive = ingot.export_model(net, steps=steps, name="types")

    Args:
        labels: the names of classes, in the order of the probabilities.
        logits: the graph's output with the probability of each class.
        max_items: files of a request; 1 if the files of a call change each other's answers, as for magika's model.
        options: fields of :class:`~ingot.steps.bytes.Bytes`, such as ``first``, ``last`` and ``values``, the graph's
            input, and of :class:`~ingot.steps.after.relabel.Relabel`, such as ``thresholds`` and ``texts``. ``text``
            and ``binary`` are of both.

    Raises:
        InvalidArgument: an option is wrong.
    """
    task = "file-classification"
    before, after = split(task, options, Bytes, Relabel)
    both = {name: before[name] for name in ("decided", "text", "binary") if name in before}
    content, relabel = Bytes(**before), Relabel(**both, **after)
    classify = Classify(logits=logits, function="none", labels=tuple(labels), top_k=1)
    inputs = (TensorSpec(content.file, DType.BYTES, (BATCH,)),)
    found = described(task, inputs, content, (classify, relabel), best_classes(classify), max_items=max_items)
    rows = 1 if max_items == 1 else BATCH
    most = max(255, content.padding)
    return replace(found, inputs=(f"{content.values}:int32[{rows},{content.first + content.last}]=0..{most}",))
