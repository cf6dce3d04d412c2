"""Graphs of all stages as one page, or one of them as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ingot.export.graphs import drawing
from ingot.export.graphs.folding import Folded, Part, View
from ingot.export.graphs.stages import Stage
from ingot.report import diagrams, pages


def html(name: str, stages: Sequence[Stage], notes: Sequence[str] = ()) -> str:
    """Return a page with a tab for each graph. All text in it is escaped: names come from the model."""
    tabs = "".join(
        f'<input type="radio" name="stage" id="tab{number}"{" checked" if number == 0 else ""}>'
        f'<label for="tab{number}">{escape(stage.title)}</label>'
        for number, stage in enumerate(stages)
    )
    tabs += '<input type="checkbox" id="fit"><label for="fit">fit to width</label>'
    shown = "".join(f'<div class="panel">{_panel(f"g{number}", stage)}</div>' for number, stage in enumerate(stages))
    rules = ",".join(f"#tab{number}:checked~.panels>.panel:nth-child({number + 1})" for number in range(len(stages)))
    return pages.page(
        name,
        "graphs",
        "click a folded module to see its nodes; hover over a box for its details",
        [
            ("Graphs", f'<div class="tabs">{tabs}<div class="panels">{shown}</div></div>'),
            ("Notes", pages.listing(notes)),
        ],
        "sizes of weights are those in memory; values are not shown",
        f"{diagrams.STYLE}{_STYLE}{rules}{{display:block}}",
    )


def svg(name: str, stage: Stage) -> str:
    """Return one graph as an SVG file: its first drawing, in which large modules are folded."""
    folded = Folded(stage.graph, stage.marks)
    drawn = drawing.draw(folded, folded.views[0], stage.marks, lambda part: "")
    return diagrams.image(drawn, f"{name}: {stage.title}")


def _panel(prefix: str, stage: Stage) -> str:
    folded = Folded(stage.graph, stage.marks)
    numbers = {id(view): number for number, view in enumerate(folded.views)}

    def link(part: Part) -> str:
        return f"{prefix}-{numbers[id(folded.view_of(part))]}"

    first, *others = folded.views
    inner = "".join(
        pages.details(
            _summary(folded, view), f'<div id="{prefix}-{number}">{drawing.draw(folded, view, stage.marks, link)}</div>'
        )
        for number, view in enumerate(others, 1)
    )
    return (
        f"<p>{_line(stage, folded)}</p>{diagrams.legend(drawing.kinds(folded))}"
        f"{drawing.draw(folded, first, stage.marks, link)}{inner}"
    )


def _line(stage: Stage, folded: Folded) -> str:
    parts = [f"{len(folded.nodes)} nodes, {len(stage.graph.weights)} weights"]
    if lost := len(stage.graph.nodes) - len(folded.nodes):
        parts.append(f"{lost} further nodes are not drawn, as they depend on a cycle")
    if stage.other:
        changes = drawing.mark_of(stage.marks, folded.nodes)
        said = ", ".join(
            f'<span class="{change.value}">{count} {change.value}</span>' for change, count in changes.items()
        )
        parts.append(f"compared with {escape(stage.other)}: {said or 'no node differs'}")
    return "; ".join(parts)


def _summary(folded: Folded, view: View) -> str:
    part, count = view.part, len(view.alike)
    names = pages.code(part.title)
    if count > 1:
        names += f" to {pages.code(view.alike[-1].title)}" if count > 2 else f" and {pages.code(view.alike[-1].title)}"
    equal = f"{count} equal parts, each of {len(part)} nodes" if count > 1 else f"{len(part)} nodes"
    return f"{names} <small>{equal}</small>"


_STYLE = """
.tabs{display:flex;flex-wrap:wrap;gap:6px}.tabs>input{position:absolute;opacity:0}
.tabs>label{padding:5px 12px;border:1px solid var(--line);border-radius:8px;cursor:pointer}
.tabs>label:hover{border-color:var(--key)}.tabs>input:checked+label{background:var(--key);color:var(--card)}
.tabs>input:focus-visible+label{outline:2px solid var(--key);outline-offset:2px}
.tabs>label[for=fit]{margin-left:auto;color:var(--soft)}#fit:checked~.panels .diagram{width:100%!important}
.panels{width:100%;margin-top:12px;min-width:0}.panel{display:none}
details{border-top:1px solid var(--line);padding:6px 0}summary{cursor:pointer;overflow-wrap:anywhere}
summary:hover{color:var(--key)}span.added{color:var(--good)}span.removed{color:var(--bad)}span.changed{color:var(--c2)}
@media (max-width:600px){header,main,footer{padding:0 10px}section{padding:14px 12px}}
"""
