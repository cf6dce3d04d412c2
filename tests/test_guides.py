"""The blocks of the guides run: those of a page together, or each section of a page alone, in a new folder.

Pages that are not listed here have no ``bash`` blocks, or a test that belongs to them alone, as the registry's has.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import guide
from tests.support import ROOT, RequireTool, RunIngot, succeeded

DOCS = ROOT / "docs"

# Texts that a page must print; its exit code must be 0.
PAGES = {
    "guides/migrate/from-fastapi.md": ["dimension 1 of input 'x' is 1, the model takes 4"],
    "guides/migrate/from-torchserve.md": ["pets:1.0  sha256:", '"status": "Healthy"', '"cat": 0.', '"good": 2'],
    "guides/make/text.md": ["the server answers many short texts", 'padding_elements_total{kind="padding"'],
    "guides/make/python-model.md": [
        '"data":["write to [email]"]',
        "can run its author's code",
        "redactor.ingot: redactor, python",
        '{"words":7,"redacted":"write to [email]"}',
        '"output":"be: b e"}',
    ],
    "guides/make/images.md": ["photos version 1"],
    "guides/make/detectors.md": ["detector version 1", "boxes ", "scores "],
    "guides/make/debug-a-capture.md": ["exit code 1", "y: error"],
    "guides/serve/apis.md": [
        '{"object":"list","data":[{"object":"embedding","index":0,"embedding":[',
        '"usage":{"prompt_tokens":6,"total_tokens":6}}',
        '"param":"input","code":"invalid_argument"',
        "check_embedding_ctx_length=False",
        "'prompt_name' is 'query'; model 'minilm' has no prompts",
    ],
    "guides/serve/image-classifier.md": ["dog 0.", "[b'dog' b'", '"data":["dog"'],
    "guides/serve/language-models.md": [
        '"object":"text_completion"',
        '"object":"chat.completion.chunk"',
        "data: [DONE]",
        '"text_output":"',
        '[{"generated_text":"',
        '"param":"logit_bias"',
        '[{"translation_text":"',
        '"param":"echo"',
        'ingot_tokens_total{kind="answer",model="writer"',
    ],
    "guides/serve/pipelines.md": ["1 model and 1 pipeline", '"red",', '"ingot_pipeline"', '"part":{"count":1,'],
    "guides/serve/sounds.md": ["bark 0.", "[0. 0.]", '"name":"label"'],
    "guides/serve/object-detection.md": ["label  score  left", "a mask of 320 x 240", "in mask.png", '"box":{"xmin":'],
    "guides/serve/texts-in-pictures.md": [
        "top left",
        "0 1.000",
        "python 0.",
        "total 118.50",
        '"polygon":[[',
        '"generated_text":"Invoice 2041"',
    ],
    "guides/serve/texts.md": [
        "POSITIVE 0.",
        '"label": [',
        'step="tokenize",version="1"} 3.0',
        "[0:",
        '"entity_group":',
        '"special":true',
    ],
    "guides/serve/write-an-engine.md": ['"platform":"reference_onnx"', "logits float32 [1, 10]"],
    "guides/deploy/behind-a-proxy.md": ["logits float32 [1, 10]"],
    "guides/operate/rotate-keys.md": ["is revoked; use another"],
}
# Each continues the one before it, in one folder.
GET_STARTED = [f"get-started/{name}.md" for name in ("first-model", "quantize", "serve", "new-version")]
# Pages whose sections are independent.
SECTIONS = {
    "guides/operate/tasks.md": {
        "Configure a server with one file": ["ingot.toml: ok, 1 setting and 1 model", '"count":2'],
        "See where a setting comes from": ["ingot.toml:2", "INGOT_SLO", "--http-port"],
        "Load and unload models of a running server": ["second:1 is ready", "second:1  ready", "second:1  unloaded"],
        "See what a new configuration changes before it is used": [
            "instances: 1 -> 2",
            "restart: http_port: 8000 -> 8080",
        ],
        "Log more without a restart": ['"log_verbose_level":1', '"log_info":false'],
        "Add a model to a running server": ['"name":"other"'],
        "Serve more models than fit in memory": ['"model_name":"first"', "memory budget", 'evictions_total{model="'],
        "Answer equal requests from memory": ['ingot_cache_hits_total{model="digits",version="1"} 2.0'],
        "Ask many requests at once from Python": ["100 answers"],
    },
    "guides/serve/roll-out.md": {
        "Change the version without downtime": ['result="ok",version="prod"} 1.0', 'result="ok",version="prod"} 2.0'],
        "Decide when a server changes": ['result="ok",version="prod"} 1.0'],
        "See why a new version was refused": ["it is unsigned"],
        "Compare a new version with the one that answers": ["1 compared, 0.00% agree", "stopped"],
        "Let a new version take over step by step": ["was rolled back", "1 % are allowed"],
        "Share the requests by hand, and go back": ["digits=digits:2", "digits=digits:prod, followed"],
        "Serve several versions": ['"versions":["1","2"]', '"versions":["1"]'],
    },
}


def sections(page: str) -> dict[str, str]:
    return dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL))


def test_every_page_with_commands_is_run() -> None:
    with_commands = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "```bash" in path.read_text()}
    assert with_commands == {*PAGES, *SECTIONS, *GET_STARTED, "guides/deploy/registry.md"}
    assert {page: sorted(sections(page)) for page in SECTIONS} == {page: sorted(SECTIONS[page]) for page in SECTIONS}


@pytest.mark.parametrize(("page", "title"), [(page, title) for page, titles in SECTIONS.items() for title in titles])
@pytest.mark.matrix
def test_the_commands_of_a_section_run(
    page: str, title: str, run_ingot: RunIngot, require_tool: RequireTool, digits_fp32: Path, tmp_path: Path
) -> None:
    succeeded(run_ingot("copy", digits_fp32, "digits:1"))
    check(sections(page)[title], SECTIONS[page][title], tmp_path, require_tool)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.matrix
def test_the_commands_of_a_page_run(
    page: str, run_ingot: RunIngot, require_tool: RequireTool, digits_fp32: Path, tmp_path: Path
) -> None:
    text = (DOCS / page).read_text()
    if "import rapidocr_onnxruntime" in text:
        pytest.importorskip("rapidocr_onnxruntime")  # brings another OpenCV than the extra ocr
    if "digits:1` in the store" in text:
        succeeded(run_ingot("copy", digits_fp32, "digits:1"))
    check(text, PAGES[page], tmp_path, require_tool)


@pytest.mark.matrix
def test_getting_started_runs(tmp_path: Path, require_tool: RequireTool) -> None:
    text = "\n".join((DOCS / page).read_text() for page in GET_STARTED)
    check(text, ["held-out images are right", "digits:2", "0 requests failed", "rollback"], tmp_path, require_tool)


@pytest.mark.matrix
def test_the_readme_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "readme.py").write_text(code)
    check("```bash\npython readme.py\n```\n", ["(2, 3)", "grpc://"], tmp_path)


def check(text: str, printed: list[str], folder: Path, require_tool: RequireTool | None = None) -> None:
    """Run the blocks of a text in a folder, and look for what they must print."""
    if require_tool is not None and "curl " in text:
        require_tool("curl")
    if "nginx -p" in text and shutil.which("nginx") is None:
        pytest.skip("nginx is not installed, and `make tools` leaves that to you: its package starts a server")
    result = guide.run(text, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    for expected in printed:
        assert expected in result.stdout
