"""Compare quantized models with the original: outputs and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ingot.model_store import Variant
from ingot.model_store.format.evidence import Agreement
from ingot.quant.data import variance
from ingot.quant.data.samples import Samples
from ingot.quant.metric import Comparison, Metric
from ingot.quant.metric.agreement import by_output
from ingot.quant.metric.base import rows_of
from ingot.runtime import Engine
from ingot.runtime.profiling import profile
from ingot.tensors import Array


class Runner:
    """Compares models with one original on one set of samples.

    Args:
        variant: the original.
        load: loads the original.
        calibration: the samples for calibration; None without data.
        evaluation: the samples for the metric.
        metric: the measure of accuracy.
        batches: the batch sizes that are timed.
        threads: CPU threads per call.
        progress: called with the name of each step as it begins.
        check: called between the parts of long work; an error that it raises ends the work.
    """

    def __init__(
        self,
        variant: Variant,
        load: Callable[[], Engine],
        *,
        calibration: Samples | None,
        evaluation: Samples,
        metric: Metric,
        batches: Sequence[int],
        threads: int | None,
        progress: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ):
        self.variant = variant
        self.calibration = calibration
        self.evaluation = evaluation
        self.batches = tuple(batches)
        self.threads = threads
        self.check = check
        self.example = next(evaluation.batches(1)).inputs
        self._metric = metric
        self._progress = progress
        self._load = load
        self._loaded: Engine | None = None
        progress(f"Running the original on {evaluation.rows} samples")
        self._expected = self._answers(self.original)
        # Also checks early that the metric accepts these outputs.
        self.before = metric.compare(self._expected, self._expected, evaluation).before
        self.notes = (*metric.notes(self._expected, self.before, evaluation), *self._unvaried())

    @property
    def original(self) -> Engine:
        """The original's engine, loaded on first use."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def close(self) -> None:
        """Free the original; it is loaded again when it is needed."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def compare(self, engine: Engine) -> tuple[Comparison, tuple[Agreement, ...]]:
        """Return the metric of a model, and how its outputs agree with the original's.

        Raises:
            QuantizationError: its outputs have NaN or infinity where the original's do not.
        """
        answers = self._answers(engine)
        comparison = self._metric.compare(self._expected, answers, self.evaluation)
        found, _ = by_output(self.variant.signature, self._expected, answers, self.evaluation)
        return comparison, found

    def time(
        self,
        engines: Sequence[Engine],
        timing: float,
        settled: Callable[[Sequence[profile.Latencies]], bool] = profile.steady,
    ) -> list[profile.Latencies]:
        """Return the latencies by batch of engines, timed in turn until they are settled or a limit is reached."""

        def checked(found: Sequence[profile.Latencies]) -> bool:
            self.check()
            return settled(found)

        return profile.measure_together(
            engines, self.variant.signature, self.example, self.batches, timing, settled=checked
        )

    def _unvaried(self) -> Iterator[str]:
        """Yield notes on outputs of the original that are the same for all rows."""
        if self.evaluation.rows < 2:
            return
        for spec in self.variant.signature.outputs:
            if variance.equal_rows(rows_of(self._expected, spec.name, self.variant.signature)):
                yield f"the original's output '{spec.name}' is the same for all rows: its accuracy is not tested"

    def _answers(self, engine: Engine) -> list[dict[str, Array]]:
        answers = []
        for batch in self.evaluation.batches():
            self.check()
            answers.append(engine.run(batch.inputs))
        return answers
