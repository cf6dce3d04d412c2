"""The child process of :mod:`ingot.export.diagnose.deep`: ``python -m ingot.export.diagnose.draft FOLDER``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ingot.errors import ExportError, IngotError, InvalidArgument
from ingot.export.capture import exported, functions
from ingot.export.diagnose.deep import ANSWER, REQUEST, Recipe
from ingot.export.explain import Explanation, explain, explain_at
from ingot.export.explain.causes import Cause, Kind
from ingot.export.explain.places import Place, innermost
from ingot.export.source import load_example, load_source
from ingot.export.source.subject import Description, Subject, bind, describe, prepare
from ingot.export.torch_internals import draft_report

_SHAPE = re.compile(r"Tensor\(shape: torch\.Size\((\[.*?\])\)")
_SIGNS = {"Eq": "==", "Ne": "!="}


def search(recipe: Recipe) -> list[Explanation]:
    """Make a model again and return what its draft export meets."""
    module = load_source(recipe.source, recipe.checkpoint, recipe.map_location, allow_code=recipe.allow_code)
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"{recipe.source} is a graph already, which nothing captures")
    description = describe(module.eval(), load_example(recipe.example), recipe.inputs, recipe.constants)
    subject, refused = _prepared(module, description)
    found = _drafted(module, subject)
    if refused is None or found:
        return ([refused] if refused is not None else []) + found
    return [replace(refused, details=("the search went through the whole model and met nothing else in the way",))]


def _prepared(module: nn.Module, description: Description) -> tuple[Subject, Explanation | None]:
    """Return the subject of an export, and what an export would refuse it for; a draft can look further.

    Raises:
        ExportError: the model does not run, so there is nothing to look into.
    """
    try:
        return prepare(module, description, lift_state=True), None
    except ExportError as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        if not isinstance(first, ExportError):  # it is the user's code that fails
            raise
        cause, _, advice = str(first).rpartition("; ")
        return bind(module, description), Explanation(cause, edit=advice) if cause else Explanation(advice)


def _drafted(module: nn.Module, subject: Subject) -> list[Explanation]:
    """Return what the draft export of a module meets. Of its outputs, those that are no tensors are dropped."""
    try:
        with torch.no_grad(), functions.dynamic(module):  # not quiet: the findings are what torch logs
            drafted = torch.export.draft_export(
                subject.eager.flat(),
                subject.eager.tensors(subject.example),
                dynamic_shapes=exported.dynamic_shapes(subject.inputs, subject.ranges),
            )
    except Exception as error:  # noqa: BLE001 - what even a draft cannot pass, of any kind
        return [explain(error, module)]
    report = draft_report(drafted)
    found = [_explained(item.failure_type.name, item.data, report.str_to_filename, subject) for item in report.failures]
    # One line is often met several times, the later ones being consequences of the first.
    return list({item.place or item.cause: item for item in reversed(found)}.values())[::-1]


def _explained(kind: str, data: Mapping[str, Any], files: Mapping[int, str], subject: Subject) -> Explanation:
    """Return one finding of the draft."""
    if kind == "MISSING_FAKE_KERNEL":
        sentence = f"the operator {data['op']} does not say what shapes it gives"
        return Explanation(sentence, edit="register them by torch.library.register_fake")
    if kind == "MISMATCHED_FAKE_KERNEL":
        sentence = f"the operator {data['op']} gives other tensors than it says: {data['reason']}"
        return Explanation(sentence, edit="correct its register_fake")
    frame = data["frame_locals"] or {"locals": {}, "symbols": {}}
    named = _Names(subject, {**data["symbol_to_sources"], **frame["symbols"]})
    frames = [Place(files.get(item["filename"], ""), item["line"], item["name"]) for item in data["user_stack"]]
    condition = named.written(data["expr"])
    if kind == "GUARD_ADDED":
        cause = Cause(Kind.FIXED, f"its code holds only where {condition}", "declare the dimension accordingly")
        details = []
    else:
        advice = "use torch.where or torch.cond, or state what always holds of the value by torch._check"
        cause = Cause(Kind.DECISION, "its code decides by the values of a tensor, which a graph cannot", advice)
        details = [f"the decision: {condition}, {data['occurrences']} times"]
    details += [f"{name}: {named.written(_value(value))}" for name, value in frame["locals"].items()]
    return explain_at(cause, innermost(frames), tuple(details))


def _value(shown: Any) -> str:
    """Return a variable as draft_export shows it: a tensor by its shape, all else as it is."""
    text = str(shown[0] if isinstance(shown, list) and len(shown) == 1 else shown)
    shape = _SHAPE.match(text)
    return f"tensor of {shape[1]}" if shape else text


class _Names:
    """The user's names for the symbols of a trace."""

    def __init__(self, subject: Subject, sources: Mapping[str, str | None]):
        dims = {
            f"L['tensors'][{index}].size()[{axis}]": str(dim)
            for index, spec in enumerate(subject.inputs)
            for axis, dim in enumerate(spec.shape)
        }
        self._names = {symbol: dims.get(source or "", symbol) for symbol, source in sources.items()}

    def written(self, text: str) -> str:
        """Return an expression of sympy as one of Python, in the user's names."""
        text = re.sub(r"\b[su]\d+\b", lambda match: self._names.get(match[0], match[0]), text)
        return re.sub(r"^(Eq|Ne)\((.*), (.*)\)$", lambda match: f"{match[2]} {_SIGNS[match[1]]} {match[3]}", text)


def main() -> None:
    """Read the request, search, write the answer."""
    folder = Path(sys.argv[1])
    recipe = Recipe(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    try:
        content: dict[str, Any] = {"findings": [asdict(item) for item in search(recipe)]}
    except IngotError as error:
        content = {"error": str(error)}
    (folder / ANSWER).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
