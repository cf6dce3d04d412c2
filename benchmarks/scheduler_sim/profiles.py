"""Models as a scheduler sees them: seconds of one engine call by rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MEASURED = Path(__file__).parent / "profiles.json"


@dataclass(frozen=True)
class Profile:
    """``slo`` is the time within which an answer counts, in seconds; ``source`` says where the figures are from."""

    name: str
    seconds: Mapping[int, float]
    slo: float
    source: str

    @property
    def capacity(self) -> float:
        """The most rows a second, at the best of the known batch sizes; larger ones may do a little better."""
        return max(rows / seconds for rows, seconds in self.seconds.items())


def _rates(**rates: float) -> dict[int, float]:
    return {int(rows[1:]): int(rows[1:]) / rate for rows, rate in rates.items()}


# Samples a second at batches of 1, 8 and 32, on one core of an x86 server with ONNX Runtime 1.31 and one thread.
_CORE = "one core of an x86 server, ONNX Runtime 1.31.1, one thread"
PROFILES = (
    Profile("tiny", _rates(b1=134e3, b8=745e3, b32=1363e3), 0.0005, _CORE),
    Profile("wide", _rates(b1=255, b8=1383, b32=2100), 0.05, _CORE),
    Profile("minilm", _rates(b1=32.5, b8=31.5, b32=28.3), 0.05, _CORE),
    Profile("cnn", _rates(b1=29.6, b8=30.1, b32=30.6), 0.05, _CORE),
    Profile(
        "gpu",
        {rows: 0.004 + 0.00015 * rows for rows in (1, 2, 4, 8, 16, 32, 64)},
        0.05,
        "synthetic: 4 ms a call and 0.15 ms a row, the form that GPUs' profiles have",
    ),
)


def load(path: Path | None = None) -> tuple[Profile, ...]:
    """Return the profiles, with those that ``--measure`` wrote for this machine in place of the same names."""
    path = path or MEASURED
    if not path.exists():
        return PROFILES
    found = json.loads(path.read_text())["profiles"]
    return tuple(
        Profile(item.name, {int(rows): taken for rows, taken in found[item.name].items()}, item.slo, "this machine")
        if item.name in found
        else item
        for item in PROFILES
    )
