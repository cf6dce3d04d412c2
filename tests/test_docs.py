"""The documentation is complete and correct: nothing is undocumented, and examples run."""

from __future__ import annotations

import ast
import asyncio
import doctest
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
import typer

import ingot
from ingot import QuantConfig
from ingot.cli.main import app
from ingot.config import ServerConfig
from ingot.errors import CLASSES
from ingot.protocol import json_codec
from ingot.quant.config import ENGINES, RECIPES, Recipe
from ingot.quant.data.sources.transform import ImageTransform
from ingot.quant.metric.parse import NAMES
from ingot.runtime import Metrics
from ingot.server.http.api import Api
from ingot.server.http.app import create_app
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.operations import OPERATIONS
from ingot.server.torchserve import api as torchserve
from ingot.serving import Repository
from ingot.steps.pipeline import AnyStep
from ingot.steps.tasks.declared import TASKS
from scripts import reference_text, settings_table
from tests.support import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCS = "\n".join(path.read_text() for path in PAGES if path.is_relative_to(ROOT / "docs"))
PACKAGES = "|".join(path.name for path in (ROOT / "ingot").iterdir() if (path / "__init__.py").is_file())
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_examples_that_parse_and_a_text_for_each_option(name: str) -> None:
    for called, command in reference_text.all_commands(COMMANDS[name], f"ingot {name}"):
        assert all(item.help for item in command.params), f"an option of {called} has no text"
        examples = re.findall(r"(?m)^    (ingot .*)$", command.help)
        assert examples, f"{called} has no example"
        for example in examples:
            words = shlex.split(example.replace("\\[", "[").partition(" > ")[0])
            assert example.startswith(f"{called} ") or example == called
            command.make_context(called, words[len(called.split()) :])


@pytest.mark.matrix
def test_the_reference_has_every_command_and_option() -> None:
    page = reference_text.commands()
    for called, command in reference_text.all_commands(typer.main.get_command(app), "ingot"):
        section = re.search(rf"^## `{called}`$.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section is not None
        assert "[default:" not in section[0]  # it has a column
        for option in [option for item in command.params for option in (*item.opts, *item.secondary_opts)]:
            shown = option in section[0] or not option.startswith("-")
            assert shown or option.removeprefix("--").replace("-", "_").removeprefix("no_") in ServerConfig.settings()


# In the order in which a user meets them: the first writes the file that the others read.
EXAMPLES = ("export_model", *sorted(set(ingot.__all__) - {"__version__", "errors", "IngotError", "export_model"}))


@pytest.mark.matrix
def test_the_examples_of_the_public_names_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"asyncio": asyncio, "ingot": ingot, "np": np, "torch": torch}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    failures: list[str] = []
    for name in EXAMPLES:
        example = doctest.DocTestParser().get_doctest(getattr(ingot, name).__doc__, names, name, None, None)
        runner.run(example, out=failures.append, clear_globs=False)
        names.update(example.globs)
        if name == "export_model":
            shutil.copy(names["archive"].unpacked().variant().path(), "net.onnx")
    assert failures == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_public_name_is_in_the_reference_with_an_example(name: str) -> None:
    assert f"\n::: ingot.{name}\n" in (ROOT / "docs" / "reference" / "python.md").read_text()
    assert "Examples:\n" in getattr(ingot, name).__doc__


def test_what_is_generated_from_the_settings_is_current() -> None:
    page = settings_table.PAGE.read_text()
    assert settings_table.table() in page, "run python scripts/settings_table.py"
    assert settings_table.updated(page) == page
    assert settings_table.keywords() == settings_table.KEYWORDS.read_text(), "run python scripts/settings_table.py"
    assert settings_table.schema_text() == settings_table.SCHEMA.read_text(), "run python scripts/settings_table.py"


def test_every_setting_is_an_option_unless_only_the_file_has_it() -> None:
    options = {parameter.name: parameter for parameter in COMMANDS["serve"].params}
    for name, setting in ServerConfig.settings().items():
        assert (name in options) is not setting.file_only
        if not setting.file_only:
            assert setting.option in options[name].opts
            assert setting.shown_default
            assert f"[default: {setting.shown_default}]" in options[name].help


QUANTIZATION = (ROOT / "docs" / "guides" / "make" / "quantization.md").read_text()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_and_its_options_are_documented(name: str) -> None:
    table = "\n".join(line for line in QUANTIZATION.splitlines() if line.startswith("| `"))
    assert f"| `{name}` | `{RECIPES[name].__name__}` |" in table
    for field in fields(RECIPES[name]):
        rows = re.findall(rf"^(?:\| `{field.name}` \|.*|- `{field.name}` of (?:.+\n)+?)(?=- |\n|$)", QUANTIZATION, re.M)
        everywhere = field.name in {item.name for item in fields(Recipe)}
        assert any(everywhere or f"`{name}`" in row for row in rows), f"{field.name} of {name} is not documented"
        for choice in get_args(get_type_hints(RECIPES[name])[field.name]) if field.name != "keep" else ():
            assert f"`{choice}`" in rows[0], f"{field.name}={choice} of {name} is not documented"


@pytest.mark.parametrize("field", [item.name for item in fields(QuantConfig)])
def test_every_setting_of_quantization_is_documented(field: str) -> None:
    assert f"| `{field}` | `--" in QUANTIZATION


def test_every_quantization_metric_engine_and_transform_is_documented() -> None:
    names = {*NAMES, *ENGINES, *(item.name for item in fields(ImageTransform))}
    assert sorted(name for name in names if f"`{name}`" not in QUANTIZATION) == []


def test_every_metric_is_in_the_reference_with_its_labels_and_a_page_that_explains_it() -> None:
    metrics, page = Metrics(), reference_text.metrics()
    names = [family.name for family in metrics.registry.collect()]
    assert [name for name in names if not re.search(rf"^- `{name}(_total)?`", page, re.MULTILINE)] == []
    assert len(page.splitlines()) == len(names) > 60
    assert "- `ingot_canary_weight_percent` (`model`, `version`), gauge: A candidate's share" in page
    assert "- `ingot_gpu_memory_bytes` (`gpu`, `kind`), gauge: Memory" in page
    assert page.count("](") == len(reference_text._EXPLAINED)  # each has its words in the help
    assert [link for link in re.findall(r"\]\(([^)#]+)", page) if not (ROOT / "docs/reference" / link).is_file()] == []


def test_the_lists_of_metrics_and_errors_in_the_repository_are_current() -> None:
    for path in reference_text.PAGES:
        page = path.read_text()
        assert reference_text.updated(page) == page, "run python scripts/reference_text.py"
        assert "<!--" not in reference_text.built(page)
        assert len(page) > len(reference_text.built(page))  # which the page has, and its markers


def test_every_generated_part_is_made_or_says_where_it_is() -> None:
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    assert sum(page.count("<!-- generate: ") for page in pages) == 6
    for page in pages:
        parts = re.findall(r"<!-- generate: \w+ -->\n(.*?)<!-- end -->", page, re.DOTALL)
        assert page.count("<!-- generate: ") == len(parts)
        assert all(part.strip() for part in parts)


def test_every_kind_of_step_and_every_task_is_documented() -> None:
    format_ = (ROOT / "docs" / "reference" / "archive-format.md").read_text()
    kinds = [kind.model_fields["kind"].default for kind in get_args(get_args(AnyStep)[0])]
    assert [kind for kind in kinds if f"`{kind}`" not in format_ or f"``{kind}``" not in str(ingot.steps.__doc__)] == []
    assert [task for task in TASKS if f"`{task}`" not in DOCS] == []


def test_every_row_of_a_table_is_below_a_header() -> None:
    begins = re.compile(r"\n\n(\|.*)\n(.*)")
    tables = [(page.name, *found) for page in PAGES for found in begins.findall(page.read_text())]
    assert len(tables) > 40
    assert [(name, first) for name, first, second in tables if not re.fullmatch(r"[|\-: ]+", second)] == []


def test_the_glossary_explains_a_term_once() -> None:
    terms = re.findall(r"^- ([^:]+):", (ROOT / "docs" / "reference" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 60
    assert sorted(term for term in {*terms} if terms.count(term) > 1) == []


def test_every_error_code_is_documented_with_its_statuses() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    table = reference_text.error_codes()
    for code, kind in CLASSES.items():
        assert f"| `{code.value}` | `{kind.__name__}` | {json_codec.STATUS[code]} | " in table
        assert f"\n- `{code.value}`: " in page


@pytest.mark.parametrize(
    ("port", "served"),
    [
        (8080, torchserve.inference(mock.Mock())),
        (8081, torchserve.management(mock.Mock())),
        (8082, torchserve.METRICS_API),
    ],
)
def test_the_guide_lists_the_paths_of_torchserve(port: int, served: Api) -> None:
    guide = (ROOT / "docs" / "guides" / "migrate" / "from-torchserve.md").read_text()
    [item] = re.findall(rf"^- \*\*{port}\*\*, (.*(?:\n  .*)*)", guide, re.MULTILINE)
    listed = re.findall(r"`(?:OPTIONS )?(/[^`]*)`", item)
    wanted = {route.partition(" ")[2] for operation in served.operations for route in operation.http}
    assert wanted == {
        path.replace("NAME", "{model}").replace("VERSION", "{version}")
        for each in listed
        for path in {each.partition("[")[0], each.replace("[", "").replace("]", "")}
    }


@pytest.mark.matrix
def test_every_operation_is_in_the_reference() -> None:
    http, grpc_page = reference_text.http(), reference_text.grpc_methods()
    for operation in OPERATIONS:
        assert all(f"`{route}`" in http for route in operation.http)
        assert not operation.grpc or f"| `{operation.grpc}` |" in grpc_page
    assert re.findall(r"\]\(#(\w+)\)", http)
    assert {*re.findall(r"\]\(#(\w+)\)", http)} <= {name.lower() for name in re.findall(r"## `(\w+)`", http)}


def test_every_path_is_documented() -> None:
    paths = create_app(DataPlane(Repository()), 1, 1).openapi()["paths"]
    assert len(paths) > 5
    generic = re.sub(r"\{(\w+)\}", lambda match: match[1].upper()[0], " ".join(paths))
    assert [path for path in generic.split() if path not in re.sub(r"\{(\w+)\}", lambda m: m[1].upper()[0], DOCS)] == []


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.matrix
def test_pages_that_code_and_messages_name_exist() -> None:
    sources = [path for folder in ("ingot", "benchmarks", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = [
        (path, page)
        for path in (*sources, *(ROOT / "examples").rglob("*.*"), ROOT / "Dockerfile", ROOT / "Makefile")
        if path.suffix not in {".pyc", ".png"} and "node_modules" not in path.parts
        for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|json)\b", path.read_text())
    ]
    assert len(named) > 20
    assert [f"{path.relative_to(ROOT)}: {page}" for path, page in named if not (ROOT / page).is_file()] == []


def test_modules_that_pages_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(rf"`(?:ingot/)?((?:{PACKAGES})/[\w/]*)(?:\.py)?`", page.read_text()):
            module = ROOT / "ingot" / name
            assert module.is_dir() or module.with_suffix(".py").is_file(), f"{page.name} names {name}"


def test_imports_from_ingot_that_pages_show_work() -> None:
    lines = [
        (page, line)
        for page in PAGES
        for line in re.findall(r"^ *((?:from ingot\S* )?import (?:\([^)]*\)|.+))$", page.read_text(), re.MULTILINE)
        if "ingot" in line
    ]
    assert len(lines) > 20
    for page, line in lines:
        try:
            exec(line, {})
        except ImportError as error:
            pytest.fail(f"{page.name}: {line}: {error}")


@pytest.mark.matrix
def test_everything_names_the_distribution_as_the_package_index_knows_it() -> None:
    """``ingot`` is the distribution of another project; only the import and the command are called so."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == "ingot-serve"
    pages = [*PAGES, ROOT / "Dockerfile", ROOT / "Makefile"]
    other = re.compile(r"(?<![\w.-])ingot\[|pip install\s+(?:-\S+\s+)*['\"]?ingot\b(?!-serve)")
    wrong = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (*pages, *(ROOT / "ingot").rglob("*.py"), *(ROOT / "examples").rglob("*.py"))
        for match in other.finditer(path.read_text())
    ]
    assert wrong == []


def test_tests_that_pages_name_exist() -> None:
    """``path::name`` and ``path::Class::name``: what the pages on reliability and security rest on."""
    named = 0
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", page.read_text()):
            file = ROOT / path
            assert file.is_file(), f"{page.name} names {path}"
            *classes, function = name.split("::")
            text = file.read_text()
            missing = [part for part in classes if not re.search(rf"^class {part}\b", text, re.MULTILINE)]
            assert not missing, f"{page.name} names {path}::{name}"
            assert re.search(rf"^\s*(?:async )?def {function}\(", text, re.MULTILINE), (
                f"{page.name} names {path}::{name}"
            )
            named += 1
    assert named > 60


def test_messages_that_the_faq_quotes_exist() -> None:
    """A symptom in code is a part of a message, so that the site's search finds it."""
    page = (ROOT / "docs" / "guides" / "operate" / "faq.md").read_text()
    rows = re.findall(r"^- ((?:`[^`]*`|[^`:])*)", page, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([A-Za-z/2,' ]{12,})`", row)]
    assert len(quoted) > 6
    code = "\n".join(path.read_text() for path in (ROOT / "ingot").rglob("*.py"))
    joined = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code)  # strings in several pieces
    of_others = {"Address already in use", "Socket closed"}
    assert [text for text in quoted if text not in joined and text not in of_others] == []


def test_the_messages_of_a_refused_export_are_those_that_the_page_lists() -> None:
    """Each is in the source as the page quotes it, so that a search for a message finds it."""
    source = "\n".join(_literals())
    page = (ROOT / "docs" / "guides" / "make" / "debug-a-capture.md").read_text().partition("By message:")[2]
    quoted = [" ".join(found.split()) for found in re.findall(r"(?ms)^- \*\*(.+?)\*\*", page)]
    parts = [part.strip(" ,.") for each in quoted for part in re.split(r"\.\.\.|['`();:]|\w+=\S+|\d+", each)]
    missing = [part for part in parts if len(part.split()) > 1 and part not in source]
    assert len(quoted) > 30
    assert missing == []


def _literals() -> Iterator[str]:
    """Yield the texts in Ingot's source, joined as Python joins them, with a mark for each value."""
    for path in (ROOT / "ingot").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
