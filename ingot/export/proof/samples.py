"""Raw inputs on which declared steps run, as there is no original that has any."""

from __future__ import annotations

import numpy as np

from ingot.errors import InvalidArgument
from ingot.steps import OpenedSteps, Values
from ingot.steps.after.fill import Fill
from ingot.steps.bytes import Bytes
from ingot.steps.images.image import Image
from ingot.steps.images.pictures import drawn
from ingot.steps.samples import texts
from ingot.steps.samples.files import sample_files
from ingot.steps.sounds.audio import Audio
from ingot.steps.sounds.synthesis import synthesized
from ingot.steps.tokenize import Tokenize
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes


def made(opened: OpenedSteps, example: Values, count: int) -> list[dict[str, Array]]:
    """Return sets of raw inputs for steps without an original, each of ``count`` items.

    Pictures have the size of the graph's ``example``, as steps may leave the size of a picture as it is.
    """
    sets: list[dict[str, Array]] = [{}]
    for step in opened.config.before:
        if isinstance(step, Tokenize):
            found = texts.sets(
                [f"{_mask(opened)}{text}" for text in texts.samples()[:count]],
                step.text,
                step.pair,
                required=step.pair not in opened.config.optional,
            )
            if step.overflow == "refuse":
                found = [kept for one in found if (kept := _accepted(opened, one))]
        elif isinstance(step, Image):
            height, width = example[step.pixels].shape[-2:] if step.pixels in example else (224, 224)
            files = [next(drawn(1, seed=seed, sizes=((width, height),))) for seed in range(count)]
            found = [{step.image: as_bytes(files)}]
        elif isinstance(step, Audio):
            found = [{step.audio: as_bytes(_sounds(step, example, count))}]
        elif isinstance(step, Bytes):
            found = [{step.file: as_bytes([*sample_files()][:count])}]
        else:
            continue
        sets = [{**one, **other} for one in sets for other in found]
    return sets


def _accepted(opened: OpenedSteps, values: Values) -> dict[str, Array]:
    """Return the items that the steps do not refuse, such as texts that are not too long; nothing if there are none."""

    def accepts(index: int) -> bool:
        try:
            opened.prepare({name: array[index : index + 1] for name, array in values.items()})
        except InvalidArgument:
            return False
        return True

    chosen = np.array([accepts(index) for index in range(len(next(iter(values.values()))))])
    return {name: array[chosen] for name, array in values.items()} if chosen.any() else {}


def _mask(opened: OpenedSteps) -> str:
    """Return the token of a missing word, if the steps need one in each text."""
    fill = next((step for step in opened.config.after if isinstance(step, Fill)), None)
    tokenizing = opened.tokenizing
    return "" if fill is None or tokenizing is None else f"{tokenizing.tokenizer.token(fill.mask_id)} "


def _sounds(step: Audio, example: Values, count: int) -> list[bytes]:
    """Return sounds of the length of the graph's example, if it has samples; of a second, if it has frames."""
    given = example.get(step.values)
    size = given.shape[1] if given is not None and given.ndim == 2 else int(step.rate * min(1, step.limits.seconds))
    return [*synthesized(count, seconds=max(size, step.least) / step.rate, rate=step.rate)]
