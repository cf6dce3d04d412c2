"""The export report as text for terminals, and as a page of HTML."""

from __future__ import annotations

from ingot.export.report import GraphView, Node, Report, Stage, stored
from ingot.export.report.page import UNPROVED
from ingot.export.report.page import html as html
from ingot.report.pages import versions
from ingot.report.text import items, section, table


def text(report: Report, nodes: bool = False) -> str:
    """Return a report as text.

    Args:
        report: what to show.
        nodes: list every operation of every graph with its line of the user's code, not only counts of operators.
    """
    lines = [f"{report.name}, exported from {report.source} at {report.created}"]
    lines += section("Inputs", items(report.inputs))
    lines += section("Outputs", items(report.outputs))
    lines += ["", f"Batch dimension: {report.batch or 'none'}"]
    lines += section("Capture", [f"  {item.route}: {item.failure or 'taken'}" for item in report.attempts])
    lines += section("Stages", [line for stage in report.stages for line in _stage(stage)])
    lines += section("Rewrites", _rewrites(report))
    for graph in report.graphs:
        lines += section(f"{graph.title}: {graph.size} nodes", _graph(graph, nodes))
    lines += section("Sizes", table([(name, stored(name, count)) for name, count in report.sizes.items()]))
    lines += section("Outside the operator set", items(report.outside_opset))
    lines += section(UNPROVED, items(report.conditions))
    lines += section("Notes", items(report.notes))
    made = versions(report.versions) or "unknown versions"
    return "\n".join([*lines, "", f"Made with {made}; report format {report.schema_version}", ""])


def _stage(stage: Stage) -> list[str]:
    detail = f": {stage.detail}" if stage.detail else ""
    proofs = [
        f"    {item.tensor}: error {item.error:.1e}, tolerance {item.tolerance:.0e}, {item.cases} cases"
        for item in stage.parity
    ]
    return [f"  {stage.name}, {stage.seconds:.2f} s{detail}", *proofs]


def _rewrites(report: Report) -> list[str]:
    rows = []
    for item in report.rewrites:
        error = "" if item.error is None else f"error {item.error:.1e}"
        rows.append(
            (item.rule, item.kind, f"{item.matches}x", error, f"rejected: {item.rejected}" if item.rejected else "")
        )
    return table(rows)


def _graph(graph: GraphView, nodes: bool) -> list[str]:
    counts = table([(operator, str(count)) for operator, count in graph.operators.items()])
    return [*counts, *(_node(node) for node in graph.nodes)] if nodes else counts


def _node(node: Node) -> str:
    where = " ".join(item for item in (node.module, node.source) if item)
    return f"  {node.name} {node.shape} = {node.operator}({', '.join(node.inputs)})" + (f"  # {where}" if where else "")
