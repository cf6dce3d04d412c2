"""The documentation site builds without a warning, so every link and anchor leads somewhere, and loads nothing.

The build takes some 9 s of CPU time, most of it for highlighting code.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
from ingot.errors import CLASSES
from tests.support import ROOT

pytestmark = pytest.mark.matrix  # the site takes 9 s of CPU time to build

# What a browser would load by itself.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*href=["']?https?://"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.matrix
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    assert [page.name for page in site.rglob("*.css") if re.search(r"url\(['\"]?https?:", page.read_text())] == []


def test_every_public_name_is_in_the_api_reference(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    names = set(ingot.__all__) - {"__version__", "errors", "IngotError"}
    assert [name for name in names if not re.search(rf'id="ingot\.([\w.]+\.)?{name}"', page)] == []


def test_markup_of_sphinx_does_not_show(site: Path) -> None:
    assert ":func:" not in (site / "reference" / "python.html").read_text()


def test_generated_parts_are_complete(site: Path) -> None:
    errors = (site / "reference" / "errors.html").read_text()
    assert [kind for kind in CLASSES.values() if f"<code>{kind.__name__}</code>: " not in errors] == []
    assert "/v2/models/{model}/infer" in (site / "reference" / "http-api.html").read_text()
    assert 'id="modelinferrequest"' in (site / "reference" / "grpc-api.html").read_text()
    commands = (site / "reference" / "commands.html").read_text()
    assert all(
        f"ingot {name}" in commands for name in ("export", "serve", "deploy k8s", "server keys create", "server status")
    )
    assert "<!-- generate" not in errors


def test_links_out_of_the_docs_lead_to_copies(site: Path) -> None:
    assert (site / "source" / "SECURITY.html").is_file()
    assert "GRPCInferenceService" in (site / "source" / "protos" / "open_inference.proto.html").read_text()


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("nms", "guides/make/detectors.html"),
        ("generate", "guides/serve/protocols.html"),
        ("refused export", "guides/make/debug-a-capture.html"),
        ("ingot_tls_refused_total", "reference/metrics.html"),
        ("max_body_mb", "reference/settings.html"),
    ],
)
def test_the_search_finds(site: Path, query: str, page: str) -> None:
    """A section of the page has all words of the query, as the search cuts text into words."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    cut = re.compile(index["config"]["separator"])
    sections = [item for item in index["docs"] if item["location"].partition("#")[0] == page]
    words = [{*cut.split(f"{item['title']} {re.sub('<[^>]*>', ' ', item['text'])}".lower())} for item in sections]
    assert any(found.issuperset(cut.split(query)) for found in words)


def test_home_says_how_to_install_and_why(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert 'id="install"' in home
    assert "pip install '.[cpu,export]'" in html.unescape(re.sub("<[^>]*>", "", home))
    assert 'id="why-ingot"' in home
    assert "images/page.png" in home
    assert "guides/migrate/from-triton.html" in home
