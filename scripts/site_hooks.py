"""Hooks of mkdocs: pages link to any file of the repository, and parts of the reference are written from the code.

A link that leaves ``docs`` works on GitHub as it stands. On the site it leads to a copy under ``source/``: Markdown as
a page, pictures as they are, other files as a page that shows them. ``scripts/reference_text.py`` writes what stands
between ``<!-- generate: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from scripts import reference_text

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_ROLE = re.compile(r":(?:func|class|meth|data|attr|mod):(?=<code>)")
_PICTURES = {".svg", ".png"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs`` that pages link to, and those that these link to."""
    pending = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    while pending:
        page = pending.pop()
        for match in _LINK.finditer((ROOT / page).read_text()):
            target = _target(page, match[2])
            if target.startswith("docs/") or not (ROOT / target).is_file() or files.get_file_from_path(_uri(target)):
                continue
            files.append(_file(target, config))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Write the generated parts, and point links at the site's files."""
    uri = page.file.src_uri
    here = uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"

    def moved(match: re.Match[str]) -> str:
        target = _target(here, match[2])
        return match[1] + posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".")

    if here.endswith(".md") and (ROOT / here).is_file():
        markdown = _LINK.sub(moved, markdown)
    return reference_text.built(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove Sphinx's roles, which docstrings have."""
    return _ROLE.sub("", html)


def _target(page: str, link: str) -> str:
    """Return the file that a link of a page leads to, relative to the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _uri(target: str) -> str:
    """Return where the site has a file of the repository."""
    if target == "README.md":
        return "index.md"
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    shown = target.endswith(".md") or Path(target).suffix in _PICTURES
    return f"source/{target}" if shown else f"source/{target}.md"


def _file(target: str, config: MkDocsConfig) -> File:
    path = ROOT / target
    if _uri(target) == f"source/{target}":
        return File.generated(config, _uri(target), abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
    language = {".py": "python", ".json": "json", ".toml": "toml", ".cpp": "cpp"}.get(path.suffix, "text")
    text = f"---\nsearch: {{exclude: true}}\n---\n\n# `{target}`\n\n````{language}\n{path.read_text()}\n````\n"
    return File.generated(config, _uri(target), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
