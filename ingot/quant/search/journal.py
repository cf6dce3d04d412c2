"""A file with the results of a search as they arrive, so that an interrupted search can continue."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from ingot.errors import FULL_DISK, InvalidArgument, StorageFull
from ingot.model_store.format.evidence import BatchLatency, Count, OutputAgreement
from ingot.quant.measure.trial import Trial
from ingot.quant.metric import Comparison
from ingot.quant.metric import Score as Value
from ingot.quant.report.records import Audit, Score
from ingot.quant.schemes.plan import Plan

# Bytes; a line has about a thousand, and a search a few hundred lines.
_MOST = 64 << 20
# A link could lead to another user's file, and a pipe would block. Windows has neither option.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class _Line(BaseModel):
    """A trial as it is written. Its numbers are used in computations, so they are bounded when it is read."""

    model_config = ConfigDict(frozen=True)

    key: str
    name: str
    size: Count
    latency: tuple[BatchLatency, ...]
    baseline: tuple[BatchLatency, ...]
    audit: Audit
    comparison: dict[str, Score] | None
    outputs: tuple[OutputAgreement, ...]
    failure: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        rows = [item.rows for item in self.latency]
        if rows != [item.rows for item in self.baseline] or len(set(rows)) < len(rows):
            raise ValueError("both models must be timed at the same batches")
        if bool(self.failure) == bool(rows) or bool(rows) != (self.comparison is not None):
            raise ValueError("a trial must have failed or be measured")
        if self.comparison is not None and set(self.comparison) != {"before", "after", "drop"}:
            raise ValueError("a comparison must have three scores")
        return self

    @classmethod
    def of(cls, trial: Trial) -> dict[str, Any]:
        """Return a trial as the fields of a line."""
        return {
            "key": trial.plan.key,
            "name": trial.plan.name,
            "size": trial.size,
            "latency": [item.model_dump() for item in trial.latency],
            "baseline": [item.model_dump() for item in trial.baseline],
            "audit": trial.audit.model_dump(),
            "comparison": _scores(trial.comparison) if trial.comparison is not None else None,
            "outputs": [item.model_dump() for item in trial.outputs],
            "failure": trial.failure,
        }

    def trial(self, plan: Plan) -> Trial:
        """Return the line as a trial of a plan."""
        scores = self.comparison
        return Trial(
            plan=plan,
            size=self.size,
            latency=self.latency,
            baseline=self.baseline,
            audit=self.audit,
            comparison=Comparison(**{name: Value(**dict(score)) for name, score in scores.items()}) if scores else None,
            outputs=self.outputs,
            failure=self.failure,
        )


class Journal:
    """Trials by plan, one line of JSON each.

    A file of another search (another model, data, metric or machine) is overwritten. Damaged lines, as the last
    one may be after an interruption, are skipped.

    Args:
        path: the file; None keeps results only in memory.
        search: the identity of the search, which must match for results to be reused.

    Raises:
        InvalidArgument: the file is not a journal, or cannot be read and written.
    """

    def __init__(self, path: Path | None, search: dict[str, Any]):
        self._path = path
        self._known: dict[str, _Line] = {}
        if path is None:
            return
        head = json.dumps(search, sort_keys=True)
        content = self._read(path)
        lines = content.splitlines()
        if lines and not _is_head(lines[0]):
            raise InvalidArgument(f"{path} is not a journal of a search; choose another file")
        if lines[:1] != [head]:
            self._write(path, f"{head}\n", os.O_TRUNC)
            return
        for text in lines[1:]:
            with contextlib.suppress(ValidationError):
                line = _Line.model_validate_json(text, strict=True)
                self._known[line.key] = line
        # Ends a partial line before the next result; also checks that the file can be written.
        self._write(path, "" if content.endswith("\n") else "\n", os.O_APPEND)

    @property
    def resumed(self) -> int:
        """The number of results of an earlier run."""
        return len(self._known)

    def get(self, plan: Plan) -> Trial | None:
        """Return the known trial of a plan, if any."""
        line = self._known.get(plan.key)
        return line.trial(plan) if line is not None else None

    def add(self, trial: Trial) -> None:
        """Keep a result.

        Raises:
            InvalidArgument: the file cannot be written.
        """
        if self._path is not None:
            self._write(self._path, json.dumps(_Line.of(trial)) + "\n", os.O_APPEND)

    def remove(self) -> None:
        """Remove the file: the search has ended."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path) -> str:
        try:
            with os.fdopen(_open(path, os.O_RDONLY), "rb") as stream:
                content = stream.read(_MOST + 1)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise _fault(path, error) from error
        if len(content) > _MOST:
            raise InvalidArgument(f"the journal {path} is larger than {_MOST >> 20} MiB; remove it")
        return content.decode(errors="replace")

    @staticmethod
    def _write(path: Path, text: str, how: int) -> None:
        try:
            with os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT | how), "w") as stream:
                stream.write(text)
        except OSError as error:
            raise _fault(path, error) from error


def _scores(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data; JSON has neither NaN nor infinity."""
    scores = {"before": found.before, "after": found.after, "drop": found.drop}
    return {name: kept.model_dump() if (kept := Score.of(score)) else None for name, score in scores.items()}


def _open(path: Path, flags: int) -> int:
    handle = os.open(path, flags | _FLAGS, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidArgument(f"the journal {path} is not a regular file; remove it")
    return handle


def _fault(path: Path, error: OSError) -> InvalidArgument | StorageFull:
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link; a folder; a pipe without a reader
        return InvalidArgument(f"the journal {path} is not a regular file; remove it")
    if error.errno in FULL_DISK:
        return StorageFull(f"the journal {path} cannot be written: no space is left in its folder")
    return InvalidArgument(f"the journal {path} cannot be written: {error.strerror or error}")


def _is_head(line: str) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        head = json.loads(line)
        return isinstance(head, dict) and "journal" in head
    return False
