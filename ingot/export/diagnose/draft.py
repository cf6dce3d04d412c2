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

from ingot import foreign
from ingot.errors import ExportError, IngotError, InvalidArgument
from ingot.export.capture import exported, functions
from ingot.export.diagnose.deep import ANSWER, REQUEST, Recipe
from ingot.export.explain import Explanation, explain, explain_at
from ingot.export.explain.causes import BRANCHES, Cause, Kind
from ingot.export.explain.places import Place, innermost
from ingot.export.snapshot import Snapshot
from ingot.export.source import load_example, load_source
from ingot.export.source.subject import Description, Subject, bind, describe, prepare
from ingot.export.torch_internals import draft_report

_SHAPE = re.compile(r"Tensor\(shape: torch\.Size\((\[.*?\])\)")
_SIGNS = {"Eq": "==", "Ne": "!="}


def search(recipe: Recipe) -> list[Explanation]:
    """Build a model from a recipe and return the obstacles that its draft export finds."""
    module = load_source(recipe.source, recipe.checkpoint, recipe.map_location, allow_code=recipe.allow_code)
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"{recipe.source} is already a graph, which needs no capture")
    description = describe(module.eval(), load_example(recipe.example), recipe.inputs, recipe.constants)
    subject, refused = _prepared(module, description)
    found = _drafted(module, subject)
    if refused is None or found:
        return ([refused] if refused is not None else []) + found
    return [replace(refused, details=("the search covered the whole model and found no other obstacle",))]


def _prepared(module: nn.Module, description: Description) -> tuple[Subject, Explanation | None]:
    """Return the subject of an export, and the reason why an export would reject it; a draft can search further.

    Raises:
        ExportError: the model does not run, so there is nothing to search.
    """
    try:
        return prepare(module, description, snapshot=Snapshot(module), lift_state=True), None
    except ExportError as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        if not isinstance(first, ExportError):  # the user's code failed
            raise
        cause, _, advice = str(first).rpartition("; ")
        return bind(module, description), Explanation(cause, edit=advice) if cause else Explanation(advice)


def _drafted(module: nn.Module, subject: Subject) -> list[Explanation]:
    """Return the obstacles that the draft export of a module finds; outputs that are not tensors are dropped."""

    def draft() -> torch.export.ExportedProgram:
        with (
            torch.no_grad(),
            functions.dynamic(module, hidden=True),
        ):  # not quiet(): the report is collected from torch's log
            return torch.export.draft_export(
                subject.eager.flat(),
                subject.eager.tensors(subject.example),
                dynamic_shapes=exported.dynamic_shapes(subject.inputs, subject.ranges),
            )

    drafted = foreign.outcome(draft)
    if isinstance(drafted, Exception):  # an obstacle that stops even a draft
        return [explain(drafted, module)]
    report = draft_report(drafted)
    found = [_explained(item.failure_type.name, item.data, report.str_to_filename, subject) for item in report.failures]
    # A line is often reported several times, the later ones being consequences of the first.
    return list({item.place or item.cause: item for item in reversed(found)}.values())[::-1]


def _explained(kind: str, data: Mapping[str, Any], files: Mapping[int, str], subject: Subject) -> Explanation:
    """Return one finding of the draft."""
    if kind == "MISSING_FAKE_KERNEL":
        sentence = f"the operator {data['op']} does not declare the shapes of its outputs"
        return Explanation(sentence, edit="register them by torch.library.register_fake")
    if kind == "MISMATCHED_FAKE_KERNEL":
        sentence = f"the operator {data['op']} returns other tensors than it declares: {data['reason']}"
        return Explanation(sentence, edit="correct its register_fake")
    frame = data["frame_locals"] or {"locals": {}, "symbols": {}}
    named = _Names(subject, {**data["symbol_to_sources"], **frame["symbols"]})
    frames = [Place(files.get(item["filename"], ""), item["line"], item["name"]) for item in data["user_stack"]]
    condition = named.written(data["expr"])
    if kind == "GUARD_ADDED":
        advice = "declare the dimension accordingly; torch.cond, or --capture script, keeps all sizes"
        cause = Cause(Kind.FIXED, f"its code is valid only where {condition}", advice)
        details = []
    else:
        cause = Cause(Kind.DECISION, "its code branches on the values of a tensor, which a graph cannot", BRANCHES)
        details = [f"the condition: {condition}, {data['occurrences']} times"]
    details += [f"{name}: {named.written(_value(value))}" for name, value in frame["locals"].items()]
    return explain_at(cause, innermost(frames), tuple(details))


def _value(shown: object) -> str:
    """Return a variable in the form of a report: a tensor by its shape, other values unchanged."""
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
        """Return a sympy expression as Python, with the user's names."""
        text = re.sub(r"\b[su]\d+\b", lambda match: self._names.get(match[0], match[0]), text)
        return re.sub(r"^(Eq|Ne)\((.*), (.*)\)$", lambda match: f"{match[2]} {_SIGNS[match[1]]} {match[3]}", text)


def main() -> None:
    """Read the request, search, and write the answer."""
    folder = Path(sys.argv[1])
    recipe = Recipe(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    try:
        content: dict[str, Any] = {"findings": [asdict(item) for item in search(recipe)]}
    except IngotError as error:
        content = {"error": str(error)}
    (folder / ANSWER).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
