"""A slower, deeper search for the obstacles to a capture, in a child process.

``torch.export.draft_export`` runs a model to the end despite obstacles, and lists them all. It can take minutes and may
crash, so it runs in a child process that is killed at a time limit and on Ctrl-C.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import DeadlineExceeded, ExportError
from ingot.export.explain import Explanation

REQUEST, ANSWER = "request.json", "answer.json"


@dataclass(frozen=True)
class Recipe:
    """The arguments of ``load_source`` and ``export_model``, as another process gets them in JSON.

    ``example`` is a file with example inputs. The others are as on the command line.
    """

    source: str
    inputs: tuple[str, ...] = ()
    example: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    map_location: str = "cpu"
    allow_code: bool = False


def explain_deep(recipe: Recipe, limit: float) -> tuple[Explanation, ...]:
    """Return all obstacles to the capture of a model.

    Args:
        recipe: the model and its inputs.
        limit: the time limit of the search in seconds.

    Raises:
        DeadlineExceeded: the search is not finished within the limit.
        ExportError: the model cannot be built or run, the search crashed, or it found nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, REQUEST).write_text(json.dumps(asdict(recipe)), encoding="utf-8")
        command = [sys.executable, "-m", "ingot.export.diagnose.draft", folder]
        # draft_export leaves logs in the folder for temporary files.
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
        ) as process:
            try:
                _, errors = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise DeadlineExceeded(
                    f"the search is not finished after {limit:g} s, so there may be more causes; raise --explain-limit"
                ) from None
            finally:
                process.kill()
                process.wait()
        answer = Path(folder, ANSWER)
        if not answer.is_file():
            last = errors.strip().rpartition("\n")[2][:300] or "it wrote no error message"
            raise ExportError(f"the search for causes crashed (exit status {process.returncode}): {last}")
        content = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in content:
        raise ExportError(f"the search could not start: {content['error']}")
    if not content["findings"]:
        raise ExportError("the search covered the whole model and found no obstacle")
    return tuple(Explanation(**{**item, "details": tuple(item["details"])}) for item in content["findings"])
