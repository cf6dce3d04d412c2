"""The results of a search as they come in, in a file, so that an interrupted search goes on where it was."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ingot.errors import InvalidArgument
from ingot.model_store import BatchLatency
from ingot.model_store.manifest import Agreement
from ingot.quant.metric import Comparison, Score
from ingot.quant.plan import Plan
from ingot.quant.report import Audit
from ingot.quant.trial import Trial

# What reading of damaged lines raises.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


class Journal:
    """Trials by plan, a line of JSON each.

    A file of another search (another model, data, metric or machine) is begun anew. Lines that are damaged, as the last
    one may be after an interruption, are left out.

    Args:
        path: the file; None keeps results in memory alone.
        search: what must be the same for results to be of use.

    Raises:
        InvalidArgument: the file is something else than a journal.
    """

    def __init__(self, path: Path | None, search: dict[str, Any]):
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        head = json.dumps(search, sort_keys=True)
        content = path.read_bytes().decode(errors="replace") if path.exists() else ""
        lines = content.splitlines()
        if lines and not _is_head(lines[0]):
            raise InvalidArgument(f"{path} is no journal of a search; give another file")
        if lines[:1] != [head]:
            path.write_text(f"{head}\n")
            return
        for line in lines[1:]:
            with contextlib.suppress(*_DAMAGED):
                item = json.loads(line)
                self._known[item["key"]] = item
        if not content.endswith("\n"):  # what comes next is not to be joined to half a line
            with path.open("a") as stream:
                stream.write("\n")

    @property
    def resumed(self) -> int:
        """How many results were there already."""
        return len(self._known)

    def get(self, plan: Plan) -> Trial | None:
        """Return what is known of a plan."""
        item = self._known.get(plan.key)
        if item is None:
            return None
        with contextlib.suppress(*_DAMAGED):
            return _trial(plan, item)
        return None

    def add(self, trial: Trial) -> None:
        """Keep a result."""
        if self._path is not None:
            with self._path.open("a") as stream:
                stream.write(json.dumps(_item(trial)) + "\n")

    def remove(self) -> None:
        """Remove the file: the search has come to its end."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _is_head(line: str) -> bool:
    with contextlib.suppress(ValueError):
        head = json.loads(line)
        return isinstance(head, dict) and "journal" in head
    return False


def _item(trial: Trial) -> dict[str, Any]:
    return {
        "key": trial.plan.key,
        "name": trial.plan.name,
        "size": trial.size,
        "latency": [item.model_dump() for item in trial.latency],
        "baseline": [item.model_dump() for item in trial.baseline],
        "audit": trial.audit.model_dump(),
        "comparison": asdict(trial.comparison) if trial.comparison is not None else None,
        "outputs": [item.model_dump() for item in trial.outputs],
        "failure": trial.failure,
    }


def _trial(plan: Plan, item: dict[str, Any]) -> Trial:
    scores = item["comparison"]
    return Trial(
        plan=plan,
        size=item["size"],
        latency=tuple(BatchLatency(**entry) for entry in item["latency"]),
        baseline=tuple(BatchLatency(**entry) for entry in item["baseline"]),
        audit=Audit(**item["audit"]),
        comparison=Comparison(**{name: Score(**score) for name, score in scores.items()}) if scores else None,
        outputs=tuple(Agreement(**entry) for entry in item["outputs"]),
        failure=item["failure"],
    )
