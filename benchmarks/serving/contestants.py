"""The contestants: how each server is started, its protocols, and its best settings."""

from __future__ import annotations

import filecmp
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.serving.models import Model
from benchmarks.serving.wires import OpenBinary, OpenGrpc, OpenJson, PlainBinary, PlainJson, Wire

PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Start:
    """How a server is to run: its model, ports, the format of its bodies, and its own folder."""

    model: Model
    port: int
    grpc_port: int
    format: str
    build: Path
    work: Path
    slo_ms: float | None = None


@dataclass(frozen=True)
class Tuning:
    """Settings of a peer for one model: most rows of a batch, and its delay in milliseconds.

    ``capacity`` bounds its requests where it has to answer in time; 0 keeps the default.
    """

    batch: int = 32
    delay: float = 1.0
    capacity: int = 0


class Contestant(ABC):
    """One server.

    Attributes:
        wires: how it is spoken to, by format.
        together: whether one process answers all formats.
        models: those that it is measured with.
        thorough: whether it is measured in every round; the slow ones are in the first only.
    """

    name: str
    wires: Mapping[str, Wire]
    together = True
    models: Sequence[str] = ("tiny", "wide")
    thorough = False

    @abstractmethod
    def command(self, start: Start) -> list[str]:
        """Return the command that starts it."""

    def environment(self, start: Start) -> dict[str, str]:
        """Return the variables that it needs."""
        return {}

    def missing(self, build: Path) -> str:
        """Return why it cannot run here, in a few words; empty if it can."""
        return ""

    def processes(self, formats: Sequence[str]) -> list[list[str]]:
        """Return the formats by the processes that answer them."""
        mine = [name for name in formats if name in self.wires]
        return [mine] if self.together and mine else [[name] for name in mine]


@dataclass(frozen=True)
class Ingot(Contestant):
    """This server with nothing set but ports; ``options`` are for variants that are compared."""

    name: str = "ingot"
    options: tuple[str, ...] = ()
    wires: Mapping[str, Wire] = field(
        default_factory=lambda: {"json": OpenJson(), "binary": OpenBinary(), "grpc": OpenGrpc()}
    )
    models: Sequence[str] = ("tiny", "wide", "minilm", "cnn")
    thorough: bool = True

    def command(self, start: Start) -> list[str]:
        slo = [] if start.slo_ms is None else ["--slo", f"{start.slo_ms:g}ms"]
        ports = ["--http-port", str(start.port), "--grpc-port", str(start.grpc_port)]
        source = ["serve", *start.model.source, "--device", "cpu"]
        return [sys.executable, "-m", "ingot", *source, *ports, *slo, *self.options]


@dataclass(frozen=True)
class CompiledIngot(Ingot):
    """This server as a wheel whose request path is compiled, with this environment's packages."""

    name: str = "ingot, compiled"

    def site(self, build: Path) -> Path:
        """Return the folder that the wheel is installed into."""
        return build / "envs" / "compiled"

    def environment(self, start: Start) -> dict[str, str]:
        return {"PYTHONPATH": str(self.site(start.build)), "PYTHONSAFEPATH": "1"}

    def missing(self, build: Path) -> str:
        site = self.site(build)
        sources = [path.relative_to(ROOT) for path in (ROOT / "ingot").rglob("*.py")]
        if all((site / path).exists() and filecmp.cmp(ROOT / path, site / path, shallow=False) for path in sources):
            return ""
        return f"not built from this source; run python -m benchmarks.serving.install '{self.name}'"


@dataclass(frozen=True)
class Peer(Contestant):
    """A server of ``peers/NAME/server.py``, run with its own environment if ``requirements``, else with this one."""

    name: str
    wires: Mapping[str, Wire]
    together: bool = True
    models: Sequence[str] = ("tiny", "wide")
    thorough: bool = False
    tunings: Mapping[str, Tuning] = field(default_factory=dict)

    @property
    def requirements(self) -> Path:
        return PEERS / self.name / "requirements.txt"

    @property
    def pins(self) -> bytes:
        """What its environment is made from."""
        return (PEERS / "constraints.txt").read_bytes() + self.requirements.read_bytes()

    def python(self, build: Path) -> Path:
        return build / "envs" / self.name / "bin" / "python" if self.requirements.exists() else Path(sys.executable)

    def missing(self, build: Path) -> str:
        if self.python(build).exists() and (not self.requirements.exists() or installed(build, self)):
            return ""
        return f"not installed; run python -m benchmarks.serving.install {self.name}"

    def tuning(self, model: str) -> Tuning:
        return self.tunings.get(model, Tuning())

    def command(self, start: Start) -> list[str]:
        tuning = self.tuning(start.model.name)
        options = {
            "model": start.model.path,
            "name": start.model.name,
            "port": start.port,
            "grpc-port": start.grpc_port,
            "format": start.format,
            "batch": tuning.batch,
            "delay": tuning.delay,
            "work": start.work,
        }
        if start.slo_ms is not None and tuning.capacity:
            options["capacity"] = tuning.capacity
        given = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        return [str(self.python(start.build)), str(PEERS / self.name / "server.py"), *given]

    def environment(self, start: Start) -> dict[str, str]:
        # The environment's own programs come first: some servers start others by name.
        return {
            "PYTHONPATH": str(PEERS),
            "PATH": f"{self.python(start.build).parent}:/usr/local/bin:/usr/bin:/bin",
            "BENCHMARK_MODEL": str(start.model.path),
        }


def mark(build: Path, peer: Peer) -> Path:
    """Return the file that marks a peer's environment as complete and holds the pins that it was made from."""
    return build / "envs" / peer.name / "installed"


def installed(build: Path, peer: Peer) -> bool:
    """Return whether a peer's environment is complete and made from the current pins."""
    return mark(build, peer).exists() and mark(build, peer).read_bytes() == peer.pins


@cache
def contestants() -> dict[str, Contestant]:
    """Return all by name, in the order of tables."""
    found: list[Contestant] = [*_ingots(), *_peers()]
    return {contestant.name: contestant for contestant in found}


def _ingots() -> list[Contestant]:
    grpcio = Ingot(
        "ingot, grpcio", ("--grpc-server", "grpcio"), {"grpc": OpenGrpc()}, models=("tiny", "wide"), thorough=False
    )
    fast = ("--grpc-server", "fast")
    return [Ingot(options=fast), CompiledIngot(options=fast), grpcio]


def _peers() -> list[Contestant]:
    # On one core, batches do not pay for minilm and cnn. What mosec may hold in open loops is about what it answers in
    # 50 ms.
    mosec = {"tiny": Tuning(32, 1), "wide": Tuning(32, 10, 64), "minilm": Tuning(1, 0, 1), "cnn": Tuning(1, 0)}
    every = ("tiny", "wide", "minilm", "cnn")
    return [
        Peer(
            "mosec",
            {"json": PlainJson("/inference"), "binary": PlainBinary("/inference")},
            together=False,
            models=every,
            thorough=True,
            tunings=mosec,
        ),
        Peer(
            "fastapi",
            {"json": PlainJson("/predict"), "binary": PlainBinary("/predict/binary")},
            models=every,
            thorough=True,
        ),
        Peer("torchserve", {"json": PlainJson("/predictions/{model}"), "binary": PlainBinary("/predictions/{model}")}),
        Peer("litserve", {"json": PlainJson("/predict")}),
        Peer("bentoml", {"json": PlainJson("/predict", lambda sample: {k: [v] for k, v in sample.items()})}),
        Peer("mlserver", {"json": OpenJson(), "grpc": OpenGrpc()}),
        Peer("kserve", {"json": OpenJson(), "binary": OpenBinary(), "grpc": OpenGrpc()}),
        Peer("ray", {"json": PlainJson("/json"), "binary": PlainBinary("/binary")}),
        Peer("pytriton", {"json": OpenJson(), "binary": OpenBinary(), "grpc": OpenGrpc()}),
    ]
