"""OpenVINO GenAI as a way: its own environment, the export of the model there, and a run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.generation.load import Asked, Rate

_PROGRAM = Path(__file__).with_name("genai.py")
# torchvision, which it does not need, may be built for another torch, and then optimum-cli cannot start.
_INSTALL = (
    "python -m venv {0} && {0}/bin/pip install -r benchmarks/generation/requirements-openvino.txt && "
    "{0}/bin/pip uninstall -y torchvision"
)


def rate(folder: Path, work: Sequence[Asked], clients: int, threads: int, weights: str) -> Rate:
    """Return the rate of continuous batching of the model of a folder of transformers.

    ``weights`` is ``fp32`` or ``int8``; then OpenVINO rounds activations to 8 bits in groups, as this server does.

    Raises:
        SystemExit: it is not installed, or does not answer as many tokens as were asked for.
    """
    binaries = folder.parent / "openvino-env" / "bin"
    if not (binaries / "optimum-cli").exists():
        raise SystemExit(f"OpenVINO GenAI is not installed; run {_INSTALL.format(os.path.relpath(binaries.parent))}")
    asked = {
        "folder": str(_exported(folder, binaries, weights)),
        "clients": clients,
        "threads": threads,
        "prompts": [each.prompt for each in work],
        "tokens": [each.tokens for each in work],
    }
    found = json.loads(_output([str(binaries / "python"), "-P", str(_PROGRAM)], json.dumps(asked)))
    tokens = sum(each.tokens for each in work)
    return Rate(tokens / found["clock"], tokens / found["cpu"])


def _exported(folder: Path, binaries: Path, weights: str) -> Path:
    """Return the folder of the model for OpenVINO, which the first run makes."""
    exported = folder.with_name(f"{folder.name}-openvino-{weights}")
    if not (exported / "openvino_model.bin").exists():
        options = ["--task", "text-generation-with-past", "--weight-format", weights]
        command = [str(binaries / "optimum-cli"), "export", "openvino", "-m", str(folder), *options, str(exported)]
        _output(command)
    return exported


def _output(command: Sequence[str], given: str = "") -> str:
    result = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{command[0]} failed: {result.stderr[-1000:]}")
    return result.stdout
