"""An archive's settings for its server: read from options, and checked against the model's signature."""

from __future__ import annotations

from pathlib import Path

from ingot.model_store import ServingDefaults
from ingot.runtime.dispatch.states import States, parse_pairs
from ingot.runtime.settings.labels import check_labels, read_labels
from ingot.runtime.settings.repeat import Repeat
from ingot.tensors import Signature


def parse_defaults(
    labels: Path | None, states: str | None, repeat: str | None, repeat_until: str | None
) -> ServingDefaults | None:
    """Return the settings that options of the same names ask for; None without any.

    Raises:
        InvalidArgument: a file cannot be read, or a text is not of the form ``input=output,input=output``.
    """
    found = ServingDefaults(
        labels=read_labels(labels),
        states=parse_pairs(states),
        repeat=parse_pairs(repeat),
        repeat_until=repeat_until or "",
    )
    return None if found == ServingDefaults() else found


def check_defaults(defaults: ServingDefaults, signature: Signature) -> None:
    """Check that the model has the inputs and outputs that the settings name, and as many labels as classes.

    Raises:
        InvalidArgument: it does not.
    """
    if defaults.states:
        signature = States(signature, defaults.states).signature
    if defaults.repeat:
        Repeat(inputs=defaults.repeat, until=defaults.repeat_until).check(signature)
    check_labels(defaults.labels, signature, "the labels")
