"""Explanations of failed captures: the user's line, the cause in one sentence, and an edit of that line.

Start in causes.py, which finds the cause; places.py finds the line, code.py edits it, and
the other modules each explain one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from ingot.export.explain import branches, code, conversions, loops
from ingot.export.explain.causes import Cause, Kind, find_cause
from ingot.export.explain.code import Edit
from ingot.export.explain.places import Place, find_place, forward_of

__all__ = ["Explanation", "explain", "explain_at"]


@dataclass(frozen=True)
class Explanation:
    """One failure and its remedy.

    ``source`` are lines of the user's file, ``replacement`` is the code to write instead, if known, and ``edit``
    describes the change. ``file`` is empty if the line is unknown. ``details`` are further facts about the place, such
    as the shapes of its variables.
    """

    cause: str
    file: str = ""
    line: int = 0
    source: str = ""
    edit: str = ""
    function: str = ""
    replacement: str = ""
    details: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.file else ""

    def __str__(self) -> str:
        """Return everything except the code, in one line."""
        advice = f"; {self.edit}" if self.edit else ""
        return f"{self.cause}{advice}" + (f" (at {self.place})" if self.place else "")

    def text(self) -> str:
        """Return everything, over several lines."""
        parts = [self.cause]
        if self.place:
            parts += ["", self.place, _indented(self.source)]
        parts += self.details
        if self.edit:
            parts += ["", f"Remedy: {self.edit}" + (":" if self.replacement else "")]
        if self.replacement:
            parts.append(_indented(self.replacement))
        return "\n".join(parts)


def explain(error: BaseException, module: nn.Module, others: Sequence[BaseException] = ()) -> Explanation:
    """Explain why an exporter failed.

    Args:
        error: the exporter's error.
        module: the user's module; its ``forward`` is the place if no error contains a line.
        others: errors of other exporters on the same module; one with the same cause may contain the line.
    """
    cause = find_cause(error)
    alike = [other for other in others if find_cause(other).kind is cause.kind]
    places = (find_place(item) for item in (error, *alike))
    place = next((found for found in places if found is not None), None)
    if place is None:
        return _placed(cause.sentence, Edit(cause.advice), forward_of(module))
    return explain_at(cause, place)


def explain_at(cause: Cause, place: Place | None, details: tuple[str, ...] = ()) -> Explanation:
    """Explain a cause at a line, or with an unknown line."""
    edit = _edit(cause, place) if place is not None else Edit(cause.advice)
    return replace(_placed(cause.sentence, edit, place), details=details)


def _edit(cause: Cause, place: Place) -> Edit:
    fallback = Edit(cause.advice)
    site = code.find(place.file, place.line)
    if site is None:
        return fallback
    if cause.kind is not Kind.OTHER and (found := loops.suppress(site)):
        return found
    match cause.kind:
        case Kind.DECISION:
            found = branches.decide(site, place.line) or loops.vectorize(site, place.line)
            return found or conversions.bound(site) or fallback
        case Kind.NUMBER:
            found = branches.decide(site, place.line) or conversions.convert(site, place.line)
            return found or conversions.bound(site) or fallback
        case Kind.FIXED:
            found = loops.vectorize(site, place.line)
            if found is None or loops.NUMBER in found.advice:
                return found or fallback
            return replace(found, advice=f"{found.advice}, {loops.NUMBER}")
        case Kind.OTHER:
            return fallback


def _placed(cause: str, edit: Edit, place: Place | None) -> Explanation:
    if place is None:
        return Explanation(cause, edit=edit.advice)
    source = edit.source or code.line_of(place.file, place.line)
    return Explanation(cause, place.file, place.line, source, edit.advice, place.function, edit.replacement)


def _indented(text: str) -> str:
    lines = text.split("\n")
    common = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join("    " + line[common:] if line.strip() else "" for line in lines)
