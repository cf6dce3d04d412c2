"""The outcome of one operator with one datatype and one exporter."""

from __future__ import annotations

from dataclasses import dataclass, field

STATUSES = {
    "crashed": "the process ended, the file cannot be loaded, or it fails on inputs that are declared valid",
    "wrong": "silently wrong: the file's answers differ, and nothing says so",
    "unexplained": "no file, and no message that names the place or the remedy",
    "refused": "no file, and a message that names the place or the remedy",
    "bounded": "the answers differ as the export's own notes state",
    "right": "equal to eager for all values and sizes, or different as the list of accepted differences allows",
    "unjudged": "eager refuses, the answer is random, undefined or sparse, or an input is complex, sparse or quantized",
}
"""From the worst to the best."""
MARK = "outcome: "
"""Begins a line of a child process that is an outcome in JSON."""


@dataclass
class Outcome:
    """How many samples of an operator have each status of :data:`STATUSES`."""

    operator: str
    dtype: str
    exporter: str
    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.operator, self.dtype, self.exporter

    @property
    def status(self) -> str:
        """The worst status of a sample."""
        return next((status for status in STATUSES if self.counts.get(status)), "unjudged")

    def add(self, status: str, count: int = 1, message: str = "") -> None:
        """Count samples, and keep the messages of the three worst."""
        self.counts[status] = self.counts.get(status, 0) + count
        if message:
            self.messages.append(f"{status}: {message[:400]}")
            self.messages.sort(key=lambda text: list(STATUSES).index(text.partition(":")[0]))
            del self.messages[3:]
