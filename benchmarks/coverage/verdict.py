"""The outcome of one case with one exporter."""

from __future__ import annotations

from dataclasses import dataclass, field

STATUSES = {
    "correct": "equal to the module at every unseen size",
    "wrong": "a file whose answers differ",
    "broken": "a file that cannot be loaded, or fails on inputs that are declared valid",
    "explained": "no file, and a message that names the place or the remedy",
    "unexplained": "no file, and no such message; a crash; out of time or memory",
}


@dataclass
class Verdict:
    """A status of :data:`STATUSES` and the exporter's last step.

    ``error`` is the largest difference, as a share of an output's largest magnitude. ``seconds`` is what the export
    took, without the judging; ``cpu`` the processor's share of it, of all threads. ``notes`` are
    those of the export itself.
    """

    name: str
    family: str
    exporter: str
    status: str = "unexplained"
    captured: bool = False
    lowered: bool = False
    error: float | None = None
    seconds: float = 0.0
    cpu: float = 0.0
    message: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.exporter
