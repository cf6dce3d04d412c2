"""The coverage run's zoo and judge; the run itself takes an hour and is not a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.coverage import exporters, table, zoo
from benchmarks.coverage.case import Case, Tensors, leaves, nest
from benchmarks.coverage.judge import Broken, Candidate, Wrong, judge
from benchmarks.coverage.verdict import Verdict
from ingot.model_store import BoundsEvidence, CallBytes
from ingot.tensors import Array, Signature

Change = Callable[[list[Array]], list[Array]]


def answering(case: Case, change: Change = lambda outputs: outputs, forgetful: bool = False) -> Callable[[], Candidate]:
    """Return a function that starts the module itself as a candidate, with changed answers or lost state."""

    def start() -> Candidate:
        kept = case.module()

        def call(inputs: Tensors) -> list[Array]:
            module = case.module() if forgetful else kept
            with torch.no_grad():
                outputs = leaves(module(**nest(inputs), **case.constants))
            return change([tensor.numpy() for tensor in outputs])

        return call

    return start


def test_the_zoo_is_as_large_as_promised_and_every_name_is_one_case() -> None:
    own = [case for case in zoo.CASES if case.family == "own"]
    assert len(own) >= 15
    assert len(zoo.CASES) - len(own) >= 60
    assert len({case.name for case in zoo.CASES}) == len(zoo.CASES)


def test_judged_inputs_never_have_the_example_sizes() -> None:
    for case in zoo.CASES:
        for sizes in case.unseen_sizes:
            assert all(size != case.example_sizes[symbol] for symbol, size in sizes.items()), case.name
            assert all(size in case.ranges[symbol] for symbol, size in sizes.items()), case.name


@pytest.mark.parametrize("name", ["dlrm", "cached_decoder", "running_statistics", "detector", "selection"])
def test_a_module_equals_itself(name: str) -> None:
    case = zoo.find(name)
    assert judge(case, answering(case)) == 0


def test_a_small_error_in_one_element_is_wrong() -> None:
    def change(outputs: list[Array]) -> list[Array]:
        outputs[0].flat[0] += 2e-4 * np.abs(outputs[0]).max()
        return outputs

    case = zoo.find("unet")
    with pytest.raises(Wrong, match=r"output 0 departs by 2\.0e-04 .* at batch 1, height 64"):
        judge(case, answering(case, change))


def test_an_output_of_another_type_or_shape_is_wrong() -> None:
    case = zoo.find("two_towers")
    with pytest.raises(Wrong, match="output 0 is float64 instead of float32"):
        judge(case, answering(case, lambda outputs: [outputs[0].astype(np.float64), *outputs[1:]]))
    with pytest.raises(Wrong, match=r"output 0 has shape"):
        judge(case, answering(case, lambda outputs: [outputs[0][:, :1], *outputs[1:]]))
    with pytest.raises(Wrong, match="2 outputs instead of 3"):
        judge(case, answering(case, lambda outputs: outputs[:2]))


def test_state_that_is_lost_between_calls_is_wrong() -> None:
    for case in (case for case in zoo.CASES if case.stateful):
        with pytest.raises(Wrong, match="call 2"):
            judge(case, answering(case, forgetful=True))


def test_a_call_that_fails_is_broken() -> None:
    def fail(outputs: list[Array]) -> list[Array]:
        raise RuntimeError("Got invalid dimensions")

    case = zoo.find("dlrm")
    with pytest.raises(Broken, match="at batch 1, call 1: RuntimeError: Got invalid dimensions"):
        judge(case, answering(case, fail))


def test_an_export_whose_bound_exceeds_what_was_measured_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bounds = BoundsEvidence(calls=(CallBytes(sizes={"batch": 2}, peak=1 << 20, measured=1000),))
    evidence, provenance = SimpleNamespace(bounds=bounds, deviations=()), SimpleNamespace(notes=())
    variant = SimpleNamespace(serving=SimpleNamespace(evidence=evidence, provenance=provenance))
    archive = SimpleNamespace(variant=lambda: variant, signature=Signature((), ()))
    monkeypatch.setattr("ingot.export.export_model", lambda *_, **__: archive)
    case = zoo.find("row_loop")
    start = exporters.ingot(case, Verdict(case.name, case.family, "ingot"), tmp_path)
    with pytest.raises(Broken, match=r"bound of a call's memory, 1 MiB at batch 2, is 64 times the 1000 B measured"):
        start()


def test_written_verdicts_are_read_back(tmp_path: Path) -> None:
    verdict = Verdict("net", "own", "transformers", "correct", True, True, 1e-6, 3.0, 2.0)
    table.write([verdict], tmp_path)
    assert table.read(tmp_path) == [verdict]


def test_the_page_shows_time_relative_to_plain() -> None:
    times = {("a", "plain"): 2.0, ("a", "ingot"): 3.0, ("b", "plain"): 1.0, ("b", "ingot"): 4.0, ("c", "plain"): 1.0}
    verdicts = [Verdict(name, "own", exporter, "correct", cpu=cpu) for (name, exporter), cpu in times.items()]
    assert "CPU seconds over plain's: ingot 2.8 in the median, 4.0 at worst (b), of 2 cases." in table.markdown(
        verdicts
    )


def test_the_page_counts_each_exporter_and_shows_every_failure() -> None:
    verdicts = [
        Verdict("net", "own", "plain", "wrong", True, True, message="a | b"),
        Verdict("net", "own", "ingot", "correct", True, True, 1e-6, 3.0),
    ]
    page = table.markdown(verdicts)
    assert "| correct | 1 (100.0%) | 0 (0.0%) |" in page
    assert "| net | own | correct | wrong | 1.0e-06 |" in page
    assert "Correct by ingot alone: net." in page
    assert r"| net | plain | wrong | a \| b |" in page
