"""A diff as text for terminals, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ingot.model_store.diff.records import Diff, GraphDiff, StepChange, StepsDiff, TensorChange, VariantDiff
from ingot.report import pages
from ingot.report.text import one_line, table
from ingot.report.units import duration, number, size, times

# The default number of rows per table; a recipe alone has one fact per layer.
SHOWN = 20
_Rows = list[tuple[str, ...]]
_NONE = "-"


def text(diff: Diff, shown: int = SHOWN) -> str:
    """Return a diff as text, with at most ``shown`` rows of each kind of change."""
    lines = [
        f"before  {one_line(diff.before.label)}  {diff.before.digest}  {size(diff.before.size)}",
        f" after  {one_line(diff.after.label)}  {diff.after.digest}  {size(diff.after.size)}",
        verdict(diff),
    ]
    for title, rows in _sections(_changes(diff)):
        lines += ["", title, *table(_cut(rows, shown))]
    for variant in diff.variants:
        lines += ["", f"variant {one_line(variant.name)}: {_state(variant)}"]
        for title, rows in _sections(_variant(variant)):
            lines += [f"  {title}", *table(_cut(rows, shown), "    ")]
        lines += [f"  note: {one_line(note, 1000)}" for note in _notes(variant)]
    return "\n".join([*lines, ""])


def html(diff: Diff, shown: int = SHOWN) -> str:
    """Return a diff as a page; all text in it is escaped, whatever an archive calls its parts."""
    sections = [("Result", f"<p>{escape(verdict(diff))}</p>{_sides(diff)}")]
    sections += [(escape(title).capitalize(), _table(rows, shown)) for title, rows in _sections(_changes(diff))]
    for variant in diff.variants:
        body = f"<p>{escape(_state(variant))}</p>"
        for title, rows in _sections(_variant(variant)):
            body += f"<h3>{escape(title).capitalize()}</h3>{_table(rows, shown)}"
        name = escape(one_line(variant.name))
        sections.append((f"Variant {name}", body + pages.listing([one_line(note, 1000) for note in _notes(variant)])))
    subtitle = f"{pages.code(one_line(diff.before.label))} and {pages.code(one_line(diff.after.label))}"
    title = one_line(diff.after.label)
    return pages.page(title, "difference", subtitle, sections, f"difference format {diff.schema_version}", _STYLE)


def verdict(diff: Diff) -> str:
    """Return a one-sentence summary of the difference."""
    if diff.before.digest == diff.after.digest and diff.same:
        return "They are the same archive."
    counts = {state: sum(item.state == state for item in diff.variants) for state in _STATES}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    new = diff.after.size - diff.shared
    return (
        f"Variants: {states}. {_share(diff.shared, diff.after.size)} of the bytes are shared: "
        f"{size(new)} of {size(diff.after.size)} are new."
    )


_STATES = ("changed", "added", "removed", "unchanged")
_STYLE = "h3{margin:18px 0 6px}"


def _sides(diff: Diff) -> str:
    return pages.definitions(
        (title, f"{pages.code(one_line(side.label))}, {pages.code(side.digest)}, {size(side.size)}")
        for title, side in (("Before", diff.before), ("After", diff.after))
    )


def _state(variant: VariantDiff) -> str:
    parts: list[str] = [variant.state]
    after = variant.size_after
    sizes = dict.fromkeys(size(item) for item in (variant.size_before, after) if item is not None)
    parts.append(", now ".join(sizes))
    if after is not None and variant.state != "unchanged":
        parts.append(f"{_share(variant.shared, after)} of its bytes shared")
    if variant.same_model and variant.state != "unchanged":
        parts.append("graph and weights the same")
    return ", ".join(parts)


def _changes(diff: Diff) -> Iterator[tuple[str, _Rows]]:
    rows = [_row(one_line(item.what), item.before, item.after) for item in diff.changes]
    yield "what differs", [("", "before", "after"), *rows]


def _variant(variant: VariantDiff) -> Iterator[tuple[str, _Rows]]:
    facts = [_row(one_line(item.what), item.before, item.after) for item in variant.changes]
    yield "what differs", [("", "before", "after"), *facts]
    numbers = [(one_line(item.what), _number(item.before), _number(item.after)) for item in variant.measures]
    yield "measured", [("", "before", "after"), *numbers]
    yield (
        "latency",
        [
            ("rows", "before", "after", "times as fast"),
            *(
                (str(item.rows), _seconds(item.before), _seconds(item.after), times(item.speedup) or _NONE)
                for item in variant.latency
            ),
        ],
    )
    if variant.goldens:
        rows = [(one_line(item.tensor), _difference(item.difference)) for item in variant.goldens]
        cases = "case" if variant.golden_cases == 1 else "cases"
        yield f"answers in {variant.golden_cases} golden {cases}", [("", "largest difference"), *rows]
    if variant.steps is not None:
        yield from _steps(variant.steps)
    if variant.graph is not None:
        yield from _graph(variant.graph)


def _notes(variant: VariantDiff) -> tuple[str, ...]:
    return (*variant.notes, *(variant.steps.notes if variant.steps is not None else ()))


def _steps(found: StepsDiff) -> Iterator[tuple[str, _Rows]]:
    rows = [
        (f"{one_line(item.step)}: {one_line(item.what)}", f"{item.differ} of {item.items}", _apart(item))
        for item in found.steps
    ]
    yield "steps before the graph", [("", "differ", "largest difference"), *rows]
    if (labels := found.labels) is not None:
        changes = (("added", labels.added), ("removed", labels.removed), ("of another number", labels.moved))
        named = [(what, str(len(names)), one_line(", ".join(names[:SHOWN]), 200)) for what, names in changes if names]
        yield "labels", [("", "count", "names"), *named]
    answers = [
        (
            one_line(item.answer),
            f"{item.differ} of {item.items}",
            _NONE if item.largest is None else _difference(item.largest),
        )
        for item in found.answers
    ]
    yield "final answers to the raw goldens of both", [("", "differ", "largest difference"), *answers]
    most = [
        (one_line(item.input, 80), *_row("", item.before or None, item.after or None)[1:], _difference(item.difference))
        for item in found.most
    ]
    yield "inputs whose answers changed most", [("", "before", "after", "largest difference"), *most]


def _apart(item: StepChange) -> str:
    parts = [f"{item.levels:.3g} levels"] if item.levels else []
    if item.levels is None and item.largest:
        parts.append(_difference(item.largest))
    return ", ".join([*parts, *([f"{item.refused} refused by one"] if item.refused else [])]) or _NONE


def _graph(graph: GraphDiff) -> Iterator[tuple[str, _Rows]]:
    counts = (
        ("unchanged", graph.unchanged),
        ("changed", len(graph.changed)),
        ("added", len(graph.added)),
        ("removed", len(graph.removed)),
        ("renamed", len(graph.renamed)),
    )
    title = ", ".join(f"{count} {what}" for what, count in counts if count or what == "unchanged")
    # If no tensor changed, the title says it all.
    yield f"tensors: {title}", [_TENSOR, *(_tensor(item) for item in graph.changed)]
    for what, infos in (("added", graph.added), ("removed", graph.removed)):
        rows = [(one_line(item.name), one_line(str(item)), size(item.size)) for item in infos]
        yield f"tensors {what}", [("", "type", "size"), *rows]
    yield (
        "tensors renamed",
        [("", "after"), *((one_line(item.before), one_line(item.after)) for item in graph.renamed)],
    )
    yield (
        "operators",
        [
            ("", "before", "after"),
            *((one_line(item.operator), str(item.before), str(item.after)) for item in graph.operators),
        ],
    )


_TENSOR = ("", "type", "relative change", "largest", "values that differ")


def _tensor(change: TensorChange) -> tuple[str, ...]:
    name, values = one_line(change.name), change.values
    if values is None:
        return name, one_line(f"{change.before}, now {change.after}"), _NONE, _NONE, _NONE
    odd = f", {values.odd} NaN or infinite" if values.odd else ""
    return (
        name,
        one_line(str(change.after)),
        _number(values.relative),
        _number(values.largest),
        f"{values.count}{odd}",
    )


def _sections(found: Iterator[tuple[str, _Rows]]) -> Iterator[tuple[str, _Rows]]:
    """Leave out what has no rows but its head, other than the count of tensors."""
    for title, rows in found:
        if len(rows) > 1:
            yield title, rows
        elif title.startswith("tensors: "):
            yield title, []


def _cut(rows: _Rows, shown: int) -> _Rows:
    more = len(rows) - 1 - shown
    return rows if more <= 0 else [*rows[: shown + 1], (f"and {more} more", *("" for _ in rows[0][1:]))]


def _table(rows: _Rows, shown: int) -> str:
    if not rows:
        return ""
    head, *body = ([escape(cell) for cell in row] for row in _cut(rows, shown))
    return pages.table(head, body)


def _row(what: str, before: str | None, after: str | None) -> tuple[str, ...]:
    return what, *(_NONE if item is None else one_line(item, 60) for item in (before, after))


def _share(part: int, whole: int) -> str:
    # Never "100 %" for a part.
    share = part / whole if whole else 1.0
    return f"{int(share * 1000) / 10:.1f} %"


def _number(value: float | None) -> str:
    return _NONE if value is None else number(value)


def _seconds(value: float | None) -> str:
    return _NONE if value is None else duration(value)


def _difference(value: float | None) -> str:
    return "not equal" if value is None else "none" if value == 0 else f"{value:.1e}"
