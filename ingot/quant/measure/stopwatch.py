"""Time models in a separate process, whose OpenMP threads sleep while they wait.

PyTorch computes with OpenMP, whose threads spin while they wait unless the environment says otherwise before PyTorch
is loaded. They then take the cores from engines that are timed in turn with them, and on a busy machine from each
other: on two cores with other work, a compiled ResNet18 in int8 took up to 272 ms per call, timed in turn with ONNX
Runtime or alone, and 3 to 12 ms with sleeping threads. On an idle machine both are equally fast. With sleeping threads,
timing in turn and timing alone agree. The ``ingot`` command serves with such threads too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ingot.errors import IngotError, QuantizationError
from ingot.model_store import BatchLatency
from ingot.runtime import EngineSpec, load_engine
from ingot.runtime.profiling import profile
from ingot.tensors import Array, Signature


@dataclass(frozen=True)
class Race:
    """Models of one signature to be timed in turn.

    Attributes:
        models: the file and format of each. Their code is run, so they must be trusted.
        signature: the models'.
        example: valid inputs; their first row is repeated.
        batches: the batch sizes.
        threads: CPU threads of a call; None for one per core.
        seconds: for each model and batch size.
    """

    models: Sequence[tuple[Path, str]]
    signature: Signature
    _: KW_ONLY
    example: dict[str, Array]
    batches: tuple[int, ...]
    threads: int | None = None
    seconds: float = 0.3

    def run(self) -> list[tuple[BatchLatency, ...]]:
        """Return the latencies of each model by batch, measured in another process.

        Raises:
            IngotError: a model cannot be loaded or run.
        """
        with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
            path = Path(folder) / "race"
            path.write_bytes(pickle.dumps(self))
            # With this process's module path, and without the current folder.
            found = os.pathsep.join(item or str(Path.cwd()) for item in sys.path)
            result = subprocess.run(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()", path],
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": found},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
            if result.returncode:
                last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
                raise QuantizationError(f"the models could not be timed: {last or f'exit code {result.returncode}'}")
            answer: list[tuple[BatchLatency, ...]] | IngotError = pickle.loads(path.read_bytes())
        if isinstance(answer, IngotError):
            raise answer
        return answer

    def time(self) -> list[tuple[BatchLatency, ...]]:
        """Time the models in this process; :meth:`run` uses another one."""
        with contextlib.ExitStack() as stack:
            engines = [
                stack.enter_context(
                    contextlib.closing(
                        load_engine(EngineSpec(path, format=kind, device="cpu", threads=self.threads, allow_code=True))
                    )
                )
                for path, kind in self.models
            ]
            return profile.measure_together(
                engines, self.signature, self.example, self.batches, self.seconds, settled=profile.steady
            )


def main() -> None:
    """Run the race in the file that the command line names, and replace it by the result."""
    path = Path(sys.argv[1])
    race: Race = pickle.loads(path.read_bytes())
    try:
        answer: list[tuple[BatchLatency, ...]] | IngotError = race.time()
    except IngotError as error:
        answer = error
    path.write_bytes(pickle.dumps(answer))
