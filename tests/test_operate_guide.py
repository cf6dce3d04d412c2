"""The commands of docs/operate.md run: each section in one shell and a new folder."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, RequireTool, RunIngot, succeeded

PAGE = (ROOT / "docs" / "operate.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Texts that a section must print. Its exit code must be 0.
PRINTED = {
    "Configure a server with one file": ["ingot.toml: ok, 1 setting and 1 model", '"count":2'],
    "See where a setting comes from": ["ingot.toml:2", "INGOT_SLO", "--http-port"],
    "Load and unload models of a running server": ["second:1 is ready", "second:1  ready", "second:1  unloaded"],
    "See what a new configuration changes before it is used": ["instances: 1 -> 2", "restart: http_port: 8000 -> 8080"],
    "Trace requests for a while": ['"trace_count":"1"', "COMPUTE_START"],
    "Log more without a restart": ['"log_verbose_level":1', '"log_info":false'],
    "Change the version without downtime": ['result="ok",version="prod"} 1.0', 'result="ok",version="prod"} 2.0'],
    "Decide when a server changes": ['result="ok",version="prod"} 1.0'],
    "Add a model to a running server": ['"name":"other"'],
    "See why a new version was refused": ["it is unsigned"],
    "Compare a new version with the one that answers": ["1 compared, 0.00% agree", "stopped"],
    "Let a new version take over step by step": ["was rolled back", "1 % are allowed"],
    "Serve more models than fit in memory": ['"model_name":"first"', "memory budget", 'evictions_total{model="'],
    "Answer equal requests from memory": ['ingot_cache_hits_total{model="digits",version="1"} 2.0'],
    "Ask many requests at once from Python": ["100 answers"],
    "Serve several versions": ['"versions":["1","2"]', '"versions":["1"]'],
}


def test_every_section_states_what_it_prints() -> None:
    assert sorted(PRINTED) == sorted(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.one_case
def test_the_commands_of_a_section_run(
    title: str, run_ingot: RunIngot, require_tool: RequireTool, digits_fp32: Path, tmp_path: Path
) -> None:
    require_tool("curl")
    succeeded(run_ingot("push", digits_fp32, "digits:1"))
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc:
        ports = [str(free.getsockname()[1]) for free in (http, grpc)]
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```", SECTIONS[title], re.MULTILINE | re.DOTALL))
    assert script, "a section without commands"
    script = script.replace("localhost:8000", f"localhost:{ports[0]}").replace(
        "localhost:8001", f"localhost:{ports[1]}"
    )
    served = {"INGOT_HTTP_PORT": ports[0], "INGOT_GRPC_PORT": ports[1]} if "ingot serve" in script else {}
    result = subprocess.run(
        ["bash", "-c", f"set -e -o pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"],
        cwd=tmp_path,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("INGOT_")},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "INGOT_HOME": str(tmp_path / "home"),
            "XDG_RUNTIME_DIR": str(tmp_path),
            **served,
        },
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for text in PRINTED[title]:
        assert text in result.stdout
