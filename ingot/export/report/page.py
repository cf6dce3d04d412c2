"""The export report as a page of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from ingot.export.report import Attempt, GraphView, Node, Report, Rewrite, Stage, stored
from ingot.report import charts, pages

# Further operators are collapsed.
_MOST_BARS = 12
UNPROVED = "Conditions that held at all sizes that were tried, which are not all declared ones"
# A longer list of nodes without a module is collapsed; deeper modules are shown as one.
_LONGEST = 40
_DEEPEST = 40


def html(report: Report) -> str:
    """Return a report as a page. All text in it is escaped: names come from the model."""
    sections = (
        ("Summary", _summary(report)),
        ("Capture", _attempts(report.attempts)),
        ("Stages and proofs", _stages(report.stages)),
        ("Rewrites", _rewrites(report.rewrites)),
        ("Graphs", _graphs(report.graphs)),
        ("Outside the operator set", pages.listing(report.outside_opset)),
        (UNPROVED, pages.listing(report.conditions)),
        ("Notes", pages.listing(report.notes)),
    )
    return pages.page(
        report.name,
        "export report",
        f"exported from {pages.code(report.source)} at <time>{escape(report.created)}</time>",
        sections,
        f"{escape(pages.versions(report.versions))} &middot; report format {report.schema_version}",
        charts.STYLE + _STYLE,
    )


def _summary(report: Report) -> str:
    rows = [
        ("Inputs", _codes(report.inputs)),
        ("Outputs", _codes(report.outputs)),
        ("Batch dimension", escape(report.batch or "none")),
        *((escape(name), stored(name, count)) for name, count in report.sizes.items()),
    ]
    return pages.definitions(rows)


def _codes(items: Iterable[str]) -> str:
    return "<br>".join(map(pages.code, items))


def _attempts(attempts: Sequence[Attempt]) -> str:
    rows = [
        (pages.code(item.route), pages.mark(not item.failure, "taken", "failed"), escape(item.failure))
        for item in attempts
    ]
    return pages.table(("Route", "", "Why not"), rows)


def _stages(stages: Sequence[Stage]) -> str:
    rows = []
    for stage in stages:
        first = (escape(stage.name), f"{stage.seconds:.2f} s", escape(stage.detail))
        proofs = [
            (
                pages.code(item.tensor),
                pages.mark(item.error <= item.tolerance, f"{item.error:.1e}", f"{item.error:.1e}"),
                f"{item.tolerance:.0e}",
                str(item.cases),
            )
            for item in stage.parity
        ] or [("", "", "", "")]
        rows += [(*(first if index == 0 else ("", "", "")), *proof) for index, proof in enumerate(proofs)]
    return pages.table(("Stage", "Time", "", "Output", "Error", "Tolerance", "Cases"), rows)


def _rewrites(rewrites: Sequence[Rewrite]) -> str:
    rows = [
        (
            pages.code(item.rule),
            escape(item.kind),
            str(item.matches),
            "" if item.error is None else f"{item.error:.1e}",
            pages.mark(False, "", "rejected") + f" {escape(item.rejected)}" if item.rejected else "",
        )
        for item in rewrites
    ]
    return pages.table(("Rule", "Graph", "Matches", "Error", ""), rows)


def _graphs(graphs: Sequence[GraphView]) -> str:
    if not graphs:
        return ""
    names = [{node.name for node in graph.nodes} for graph in graphs]
    marks: list[dict[str, str]] = [{} for _ in graphs]
    for index, (before, after) in enumerate(pairwise(graphs)):
        if _kind(before) == _kind(after):
            marks[index] |= dict.fromkeys(names[index] - names[index + 1], "gone")
            marks[index + 1] |= dict.fromkeys(names[index + 1] - names[index], "made")
    legend = '<span class="gone">gone in the next graph</span><span class="made">not in the one before</span>'
    shown = "".join(map(_graph, graphs, marks))
    return f'{f"<p>{legend}</p>" if any(marks) else ""}<div class="graphs">{shown}</div>'


def _kind(graph: GraphView) -> str:
    """Return the kind of a graph, FX or ONNX, with which its title begins."""
    return graph.title.partition(" ")[0]


def _graph(graph: GraphView, marks: Mapping[str, str]) -> str:
    root, flat = _Part(""), _Part("no module")
    for node in graph.nodes:
        (root.place(node.module.split(".", _DEEPEST)) if node.module else flat).nodes.append(node)
    # A graph without modules is one long list, which starts collapsed.
    own = flat.unfolding(marks) if flat.count() > _LONGEST else flat.own(marks)
    most = max([1, *graph.operators.values()])
    bars = [_bar(operator, count, most) for operator, count in graph.operators.items()]
    more = bars[_MOST_BARS:]
    rest = pages.details(f"{len(more)} more operators", "".join(more)) if more else ""
    return (
        f"<article><h3>{escape(graph.title)} <small>{graph.size} nodes</small></h3>"
        f'<div class="bars">{"".join(bars[:_MOST_BARS])}{rest}</div>{own}{root.shown(marks)}</article>'
    )


def _bar(operator: str, count: int, most: int) -> str:
    return f'<div class="bar"><code>{escape(operator)}</code>{charts.meter(count / most)}<b>{count}</b></div>'


@dataclass
class _Part:
    """A submodule, its own nodes and its parts."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    parts: dict[str, _Part] = field(default_factory=dict)

    def place(self, path: list[str]) -> _Part:
        """Return the part at a path, created if it is missing."""
        return self.parts.setdefault(path[0], _Part(path[0])).place(path[1:]) if path else self

    def count(self) -> int:
        return len(self.nodes) + sum(part.count() for part in self.parts.values())

    def shown(self, marks: Mapping[str, str]) -> str:
        """Return the part's nodes as a list, and its parts as collapsible lists."""
        return self.own(marks) + "".join(part.unfolding(marks) for part in self.parts.values())

    def own(self, marks: Mapping[str, str]) -> str:
        rows = "".join(_row(node, marks.get(node.name, "")) for node in self.nodes)
        return f"<ol>{rows}</ol>" if rows else ""

    def unfolding(self, marks: Mapping[str, str]) -> str:
        name, part = self.name, self
        while not part.nodes and len(part.parts) == 1:  # a.b.c in one step where a and b hold nothing else
            (part,) = part.parts.values()
            name = f"{name}.{part.name}"
        return _unfolding(name, part.count(), part.shown(marks))


def _unfolding(name: str, count: int, content: str) -> str:
    return pages.details(f"{pages.code(name)} <small>{count}</small>", content)


def _row(node: Node, mark: str) -> str:
    inputs = f" <i>({escape(', '.join(node.inputs))})</i>" if node.inputs else ""
    shape = f" <u>{escape(node.shape)}</u>" if node.shape else ""
    source = f" <small>{escape(node.source)}</small>" if node.source else ""
    start = f'<li class="{mark}">' if mark else "<li>"
    return f"{start}<b>{escape(node.operator)}</b> {escape(node.name)}{shape}{inputs}{source}</li>"


_STYLE = """
:root{--gone:#fdecea;--made:#e6f4ec}
@media (prefers-color-scheme:dark){:root{--gone:#3a2020;--made:#1a3327}}
.graphs{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:18px;align-items:start}
article{border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
.bars{margin-bottom:14px}.bar{display:grid;grid-template-columns:minmax(0,1.3fr) 1fr 3.5em;gap:10px;align-items:center}
.bar code{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.bar b{font-weight:500;text-align:right;font-variant-numeric:tabular-nums}
details{border-left:2px solid var(--line);padding-left:10px;margin:2px 0}summary{cursor:pointer;padding:2px 0}
summary:hover{color:var(--key)}ol{list-style:none;margin:2px 0 6px;padding:0;font:13px/1.5 ui-monospace,monospace}
ol li b{color:var(--key);font-weight:500}ol i{color:var(--soft);font-style:normal}
u{text-decoration:none;color:var(--soft)}
.gone{background:var(--gone)}.made{background:var(--made)}
section p span{display:inline-block;padding:2px 8px;border-radius:5px;margin-right:6px}
"""
