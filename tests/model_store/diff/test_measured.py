from __future__ import annotations

import numpy as np

from ingot.model_store import Agreement, BatchLatency, Evidence, Golden, ParityEvidence, Serving
from ingot.model_store.diff import diff, measured
from ingot.model_store.format.evidence import Interval, MetricEvidence
from tests.model_store.diff.models import one, variants, with_evidence


class TestMeasurements:
    def test_accuracy_agreement_and_parity(self) -> None:
        def metric(value: float, rows: int) -> MetricEvidence:
            at, drop = (Interval(value=item, low=item, high=item) for item in (value, 0.01))
            return MetricEvidence(name="accuracy", before=at, after=at, drop=drop, budget=0.01, rows=rows)

        parity = ParityEvidence(tensor="y", error=1e-6, tolerance=1e-3, cases=2)
        agreement = Agreement(tensor="y", cosine=0.99, error=0.02, sqnr=30.0)
        first = with_evidence(metric=metric(0.98, 100), parity=(parity,))
        second = with_evidence(metric=metric(0.97, 200), agreement=(agreement,), holds=True)
        found = variants(diff(one(b"", first), one(b"", second)))["fp32"]
        numbers = {item.what: (item.before, item.after) for item in found.measures}
        assert numbers["accuracy"] == (0.98, 0.97)
        assert numbers["y: cosine to its original"] == (None, 0.99)
        assert numbers["y: error of the export"] == (1e-6, None)
        assert "the metric was not measured on the same data" in found.notes
        assert [(item.what, item.after) for item in found.changes] == [("keeps its accuracy budget", "true")]

    def test_a_non_finite_number_is_left_out(self) -> None:
        """Files can hold such: JSON's readers take NaN, and 1e999."""
        evidence = Evidence(parity=(ParityEvidence(tensor="y", error=float("inf"), tolerance=1e-3, cases=2),))
        assert [item.before for item in measured.measures(evidence, Evidence())] == [None]

    def test_latency_by_batch_with_a_word_about_other_machines(self) -> None:
        def timed(machine: str, *items: tuple[int, float]) -> Serving:
            latency = tuple(BatchLatency(rows=rows, seconds=seconds) for rows, seconds in items)
            return with_evidence(machine=machine, latency=latency)

        first = timed("old", (1, 0.004), (8, 0.008))
        found = variants(diff(one(b"", first), one(b"", timed("new", (1, 0.002), (32, 0.1)))))["fp32"]
        assert [(item.rows, item.before, item.after, item.speedup) for item in found.latency] == [
            (1, 0.004, 0.002, 2.0),
            (8, 0.008, None, None),
            (32, None, 0.1, None),
        ]
        assert "the latencies were measured on 'old' and on 'new'" in found.notes[0]
        found = variants(diff(one(b"", first), one(b"", timed("old", (1, 0.002)))))["fp32"]
        assert found.notes == ()

    def test_answers_to_the_same_golden_inputs(self) -> None:
        def case(x: float, *y: float) -> Golden:
            return Golden({"x": np.full((len(y), 3), x, np.float32)}, {"y": np.array([[item] * 3 for item in y], "f4")})

        first = [case(1, 2, 4), case(2, 8)]
        found = variants(diff(one(b"", cases=first), one(b"", cases=[case(3, 0), case(1, 2, 5)])))["fp32"]
        assert found.golden_cases == 1
        assert [(item.tensor, item.difference) for item in found.goldens] == [("y", 0.25)]
        found = variants(diff(one(b"", cases=first), one(b"", cases=[case(1, 2, float("nan"))])))["fp32"]
        assert found.goldens[0].difference is None
        found = variants(diff(one(b"", cases=first), one(b"", cases=[case(5, 1)])))["fp32"]
        assert found.notes == ("the golden answers are to different inputs",)
