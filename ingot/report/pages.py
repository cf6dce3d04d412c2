"""Self-contained pages of HTML: no scripts, fonts or other files.

Arguments called HTML are inserted as they are; all other text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

# Columns that a narrow screen has room for.
_MOST_NARROW = 3


def page(
    title: str, kind: str, subtitle: str, sections: Iterable[tuple[str, str]], footer: str, style: str = ""
) -> str:
    """Return a whole page.

    Args:
        title: the name of what is reported, as text.
        kind: the kind of page, such as ``export report``.
        subtitle: the line below the title, as HTML.
        sections: titles and contents, both as HTML; sections without content are omitted.
        footer: the last line, as HTML.
        style: CSS in addition to the common style.
    """
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections if content)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page loads and runs nothing, even if a name in it got past the escaping.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)} - {kind}</title><style>{_STYLE}{_flat(style)}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{subtitle}</p></header><main>{body}</main>"
        f"<footer>{footer}</footer></body></html>"
    )


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and their values, both as HTML; empty values are omitted."""
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value) + "</dl>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML cells under titles of escaped text, or an empty text if it has no rows.

    On narrow screens a row of a table with many columns becomes lines of cells, each after its title.
    """
    if not rows:
        return ""
    many = len(head) > _MOST_NARROW
    kind = ' class="many"' if many else ""
    titles = "".join(f"<th>{title}</th>" for title in head)
    starts = [f'<td data-title="{title}">' if many and title else "<td>" for title in head]
    cells = "".join(
        "<tr>" + "".join(f"{start}{cell}</td>" for start, cell in zip(starts, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table{kind}><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table></div>'


def code(text: str) -> str:
    """Return text as code."""
    return f"<code>{escape(text)}</code>"


def listing(items: Sequence[str]) -> str:
    """Return texts as a list, or an empty text."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""


def mark(good: bool, yes: str, no: str) -> str:
    """Return one of two pieces of HTML, marked as good or bad."""
    return f'<span class="good">&#10003; {yes}</span>' if good else f'<span class="bad">&#10007; {no}</span>'


def details(summary: str, content: str) -> str:
    """Return HTML that is folded under a summary, also HTML."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def versions(packages: Mapping[str, str]) -> str:
    """Return names and versions of packages as a line of text."""
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def _flat(style: str) -> str:
    return style.replace("\n", "")


COLORS = _flat("""
:root{color-scheme:light dark;--ink:#1d2433;--soft:#667085;--page:#f5f6f8;--card:#fff;--line:#e3e6ec;--key:#3564d4;
--good:#18794e;--bad:#c4321c}
@media (prefers-color-scheme:dark){:root{--ink:#e4e7ee;--soft:#98a2b3;--page:#12151b;--card:#1a1f28;--line:#2b323e;
--key:#7ea2ff;--good:#5fcf98;--bad:#ff8f7a}}
""")
"""The colours of pages and charts, as CSS variables."""
_STYLE = COLORS + _flat("""
*{box-sizing:border-box}
body{margin:0;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page)}
header,main,footer{max-width:1500px;margin:auto;padding:0 24px}
header{padding-top:36px}h1{margin:0;font-size:30px;letter-spacing:-.02em;overflow-wrap:anywhere}
header p{margin:4px 0 20px;color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 22px;margin:0 0 18px}
h2{margin:0 0 12px;font-size:17px}h3{margin:0 0 10px;font-size:15px}small{color:var(--soft);font-weight:400}
code{font:13px/1.5 ui-monospace,monospace;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:minmax(6em,max-content) minmax(0,1fr);gap:6px 24px;margin:0}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}dd .good,dd .bad{white-space:normal}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}
th{text-align:left;font-weight:500;color:var(--soft);font-size:13px}th,td{padding:5px 18px 5px 0;vertical-align:top}
tbody tr{border-top:1px solid var(--line)}td{font-variant-numeric:tabular-nums}
td code{white-space:nowrap}
.good{color:var(--good);white-space:nowrap}.bad{color:var(--bad);white-space:nowrap}
li{padding:1px 6px;border-radius:5px;overflow-wrap:anywhere}section p{margin:0 0 12px;font-size:13px}
footer{padding-bottom:36px;color:var(--soft);font-size:13px}
@media (max-width:700px){header,main,footer{padding:0 10px}section{padding:14px}dl{display:block}
dd{margin-bottom:8px}
.many thead,.many td:empty{display:none}.many tbody tr{display:flex;flex-wrap:wrap;gap:0 16px;padding:5px 0}
.many td{padding:0;min-width:0;overflow-wrap:anywhere}.many td code{white-space:normal}
.many td[data-title]::before{content:attr(data-title) " ";color:var(--soft);font-size:13px}}
""")
