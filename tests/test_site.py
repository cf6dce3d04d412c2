"""The documentation site builds without a warning, so every link and anchor leads somewhere, and loads nothing.

The build takes some 9 s of CPU time, most of it for highlighting code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
from ingot.errors import CLASSES
from tests.support import ROOT

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


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
    assert [page.name for page in site.rglob("*.css") if re.search(r"url\(['\"]?https?:", page.read_text())] == []


def test_every_public_name_is_in_the_api_reference(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    names = set(ingot.__all__) - {"__version__", "errors", "IngotError"}
    assert [name for name in names if not re.search(rf'id="ingot\.([\w.]+\.)?{name}"', page)] == []


def test_markup_of_sphinx_does_not_show(site: Path) -> None:
    assert ":func:" not in (site / "reference" / "api.html").read_text()


def test_generated_parts_are_complete(site: Path) -> None:
    errors = (site / "reference" / "errors.html").read_text()
    assert [kind for kind in CLASSES.values() if f"<code>{kind.__name__}</code>: " not in errors] == []
    assert "/v2/models/{model}/infer" in (site / "reference" / "http-api.html").read_text()
    assert 'id="modelinferrequest"' in (site / "reference" / "grpc-api.html").read_text()
    commands = (site / "reference" / "commands.html").read_text()
    assert all(f"ingot {name}" in commands for name in ("export", "serve", "deploy k8s", "keys create", "ctl status"))
    assert "<!-- generate" not in errors


def test_links_out_of_the_docs_lead_to_copies(site: Path) -> None:
    assert (site / "source" / "SECURITY.html").is_file()
    assert "GRPCInferenceService" in (site / "source" / "protos" / "open_inference.proto.html").read_text()
