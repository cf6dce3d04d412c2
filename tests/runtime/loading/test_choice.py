"""The choice of a variant, with fake engines and times; tests/server/test_variants.py has real ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import Unsupported
from ingot.model_store import Archive, DerivedCache, Evidence, Golden, Store, Variant
from ingot.runtime import Limits, LoadSpec, Model, ModelSource, ServingTerms, Settings
from ingot.runtime.engines.loader import graphs_for, tensorrt_cache
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.loading import comparison, warmup
from ingot.runtime.loading.choice import Choice, Chooser, obstacle
from ingot.runtime.loading.placement import Placement
from ingot.runtime.machine import devices
from ingot.tensors import Array
from tests.runtime.fake_engines import FunctionEngine
from tests.runtime.variants import RIGHT, SIGNATURE, WRONG, Made, archive, timed

CPU = Settings(device="cpu")


class Engines:
    """Opens engines that know their names, and counts those that are open at once."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, FunctionEngine]] = []
        self.most = 0
        self.convolving = False

    @property
    def open(self) -> list[str]:
        return [name for name, engine in self.opened if not engine.closed]

    def form(self, variant: Variant, settings: Settings) -> LoadSpec:
        def start(device: str, threads: int) -> FunctionEngine:
            engine = FunctionEngine(lambda inputs: {"y": inputs["x"] * 2}, variant.signature)
            if self.convolving:
                engine.settings = {"convolutions": settings.convolutions}
            self.opened.append((variant.name, engine))
            self.most = max(self.most, len(self.open))
            return engine

        return LoadSpec(start, variant.goldens(), tolerance=variant.serving.golden_tolerance, variant=variant.name)

    def name(self, engine: Any) -> str:
        return next(name for name, item in self.opened if item is engine)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()
    monkeypatch.setattr(LoadSpec, "of_variant", made.form)
    return made


@pytest.fixture
def times(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The measured time of each variant; one without an entry cannot be timed."""
    seconds: dict[str, float] = {}

    def measured(pair: Sequence[Any], *_: Any) -> list[Mapping[int, float]]:
        return [{1: seconds[engines.name(engine)]} for engine in pair]

    monkeypatch.setattr(comparison, "measured", measured)
    return seconds


def choose(made: Archive, settings: Settings = CPU) -> Choice:
    return Chooser("double", made.variants, settings)()


def test_the_fastest_is_timed_and_the_others_are_closed(engines: Engines, times: dict[str, float]) -> None:
    times.update(a=0.004, b=0.001, c=0.002, d=0.003)
    choice = choose(archive([Made(name, work=index) for index, name in enumerate("abcd")]))
    assert (choice.spec.variant, choice.reason) == ("b", "measured")
    assert "b is 4.00 times as fast as a (batch 1: 4.00)" in choice.why
    assert (engines.open, engines.most) == (["b"], 2)


def test_options_of_convolutions_are_measured_for_the_chosen_variant_alone(
    engines: Engines, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines.convolving = True
    times.update(a=0.002, b=0.001)
    released: list[Placement] = []
    monkeypatch.setattr(Placement, "release", lambda placement: released.append(placement))
    choice = choose(archive([Made("a"), Made("b", 2)]))
    assert len(released) == 2  # so that the memory planned for closed engines is free for the next one
    assert choice.spec.placement not in released
    opened = [(name, engine.settings["convolutions"]) for name, engine in engines.opened]
    assert opened == [("a", "default"), ("b", "default"), ("b", "auto")]
    assert (choice.engine, engines.open, engines.most) == (engines.opened[-1][1], ["b"], 2)
    choose(archive([Made("a"), Made("b", 2)]), Settings(device="cpu", convolutions="nhwc"))
    assert [engine.settings["convolutions"] for _, engine in engines.opened[3:]] == ["nhwc", "nhwc"]


@pytest.mark.parametrize(("second", "winner"), [(0.00096, "a"), (0.00094, "b")])
def test_a_difference_of_less_than_5_percent_leaves_the_archives_order(
    engines: Engines, times: dict[str, float], second: float, winner: str
) -> None:
    times.update(a=0.001, b=second)
    assert choose(archive([Made("a"), Made("b", 2)])).spec.variant == winner
    recorded = archive([Made("a", evidence=timed(0.001)), Made("b", 2, evidence=timed(second))])
    assert (choose(recorded).spec.variant, choose(recorded).reason) == (winner, "recorded")


@pytest.mark.usefixtures("engines", "times")
class TestRecordedTimes:
    """Timing would fail here, as no times are set."""

    def test_speed_ups_over_a_common_parent_count_more_than_latencies_of_different_runs(self) -> None:
        quiet, busy = timed(0.001, baseline=0.0012), timed(0.002, baseline=0.006)
        made = archive(
            [
                Made("fp32", evidence=timed(0.0009)),
                Made("int8", 2, evidence=quiet, parent="fp32"),
                Made("bf16", 3, evidence=busy, parent="fp32"),
            ]
        )
        choice = choose(made)
        assert (choice.spec.variant, choice.reason) == ("bf16", "recorded")
        assert "bf16 is 3.00 times as fast as fp32 (batch 1: 3.00, batch 8: 3.00)" in choice.why

    def test_without_one_the_latencies_count(self) -> None:
        made = archive([Made("a", evidence=timed(0.002)), Made("b", 2, evidence=timed(0.001))])
        assert choose(made).spec.variant == "b"

    def test_the_next_best_is_taken_where_the_best_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        made = archive(
            [
                Made("a", evidence=timed(0.003)),
                Made("b", 2, evidence=timed(0.001), goldens=(WRONG,)),
                Made("c", 3, evidence=timed(0.002)),
            ]
        )
        with caplog.at_level(logging.WARNING):
            choice = choose(made)
        assert choice.spec.variant == "c"
        assert "variant b is left out: model 'double' does not reproduce its golden" in caplog.text
        assert choice.why.startswith("c is 1.50 times as fast as a")

    def test_without_any_for_one_of_them_there_is_no_comparison(self) -> None:
        made = archive([Made("a", evidence=timed(0.001)), Made("b", 2, evidence=Evidence(machine=devices.describe()))])
        assert comparison.recorded(made.variants) is None


@pytest.mark.parametrize(
    ("settings", "machine"),
    [(CPU, "another machine"), (Settings(device="cpu", instances=2), ""), (Settings(device="auto"), "gpu")],
)
def test_times_of_other_hardware_are_not_believed(
    times: dict[str, float], settings: Settings, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_cuda", lambda: machine == "gpu")
    times.update(a=0.001, b=0.002)
    wrong = timed(0.001, machine=machine.replace("gpu", ""))
    choice = choose(archive([Made("a", evidence=timed(0.002)), Made("b", 2, evidence=wrong)]), settings)
    assert (choice.spec.variant, choice.reason) == ("a", "measured")


def test_records_of_a_processor_with_other_instructions_are_not_believed(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine with the same model of processor and as many cores, as virtual machines are."""
    times.update(a=0.001, b=0.002)
    made = archive([Made("a", evidence=timed(0.002)), Made("b", 2, evidence=timed(0.001))])
    assert (choose(made).spec.variant, choose(made).reason) == ("b", "recorded")
    assert warmup.recorded(made.variants[0].serving.evidence)
    monkeypatch.setattr(devices, "cpu_features", lambda: "x86_64 amx_int8")
    assert (choose(made).spec.variant, choose(made).reason) == ("a", "measured")
    assert not warmup.recorded(made.variants[0].serving.evidence)


def test_uncertain_records_are_not_believed(times: dict[str, float]) -> None:
    times.update(a=0.001, b=0.002)
    evidence = timed(0.001)
    latency = tuple(item.model_copy(update={"spread": 0.3}) for item in evidence.latency)
    wrong = evidence.model_copy(update={"latency": latency})
    choice = choose(archive([Made("a", evidence=timed(0.002)), Made("b", 2, evidence=wrong)]))
    assert (choice.spec.variant, choice.reason) == ("a", "measured")


def test_a_variant_that_broke_its_accuracy_budget_is_the_last_resort(
    times: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    times.update(kept=0.003, unasked=0.002, broken=0.001)
    broken = Made("broken", evidence=timed(0.001, holds=False))
    kept = Made("kept", 2, evidence=timed(0.003, holds=True))
    assert choose(archive([broken, kept, Made("unasked", 3)])).spec.variant == "unasked"
    assert "left out: broken: it exceeded its accuracy budget" in caplog.text
    assert choose(archive([broken, kept]), Settings(device="cpu", variant_choice="preferred")).spec.variant == "kept"
    failing = Made("kept", 2, goldens=(WRONG,))
    assert choose(archive([broken, failing])).spec.variant == "broken"


def test_preferred_chooses_the_first_that_runs() -> None:
    preferred = Settings(device="cpu", variant_choice="preferred")
    gpu = Made("bf16", requires={"device": "cuda"})
    choice = choose(archive([gpu, Made("slow", 20), Made("fast", 1)]), preferred)
    assert (choice.spec.variant, choice.reason) == ("slow", "preferred")
    choice.engine.close()


def test_each_engine_replays_the_goldens_once(engines: Engines) -> None:
    settings = Settings(device="cpu", instances=2, variant_choice="preferred", warm_time=0)
    two, one = archive([Made("a"), Made("b", 2)]), archive([Made("a")])
    for made in (two, one):
        model = Model("double", "1", ModelSource.of_archive(made, settings, "double"), ServingTerms(settings))
        model.load()
        assert [(name, engine.calls) for name, engine in engines.opened] == [("a", [1]), ("a", [1])]
        model.close()
        engines.opened.clear()


def test_without_goldens_nothing_can_be_timed(engines: Engines, times: dict[str, float]) -> None:
    choice = choose(archive([Made("a", goldens=()), Made("b", 2, goldens=())]))
    assert choice.spec.variant == "a"
    assert "no goldens" in choice.why
    assert engines.open == ["a"]


def test_a_timing_that_fails_leaves_the_first(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    scalar = Golden({"x": np.ones((1, 256), np.float32)}, {"y": np.full((1, 256), 2, np.float32)})

    def breaks(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if len(inputs["x"]) > 1:
            raise MemoryError("no room")
        return {"y": inputs["x"] * 2}

    def form(variant: Variant, settings: Settings) -> LoadSpec:
        return LoadSpec(lambda device, threads: FunctionEngine(breaks, SIGNATURE), (scalar,), variant=variant.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadSpec, "of_variant", form)
        choice = choose(archive([Made("a"), Made("b", 2)]), Settings(device="cpu", choice_time=0.001))
    assert choice.spec.variant == "a"
    assert "could not be timed: no room" in caplog.text


def test_only_one_that_runs_needs_no_reason_more(engines: Engines) -> None:
    choice = choose(archive([Made("bf16", requires={"device": "cuda"}), Made("fp32", 2)]))
    assert (choice.spec.variant, choice.reason, choice.why) == ("fp32", "only", "")


@pytest.mark.matrix
def test_where_nothing_runs_each_variants_reason_is_reported() -> None:
    made = archive(
        [
            Made("bf16", requires={"device": "cuda"}),
            Made("aoti", format="aoti", graph=b"code"),
            Made("broken", graph=b"no model"),
            Made("wrong", goldens=(WRONG,)),
        ]
    )
    with pytest.raises(Unsupported) as caught:
        choose(made)
    for text in ("no variant of model 'double'", "bf16: it is made for GPUs", "aoti: its format", "--allow-code"):
        assert text in str(caught.value)
    assert "broken: ONNX Runtime cannot load" in str(caught.value)
    assert "wrong: model 'double' does not reproduce" in str(caught.value)


@pytest.mark.parametrize(
    ("requires", "device", "gpu", "runs"),
    [
        ({}, "cpu", False, True),
        ({}, "cuda", True, True),
        ({"device": "cuda"}, "auto", True, True),
        ({"device": "cuda"}, "cuda", True, True),
        ({"device": "cuda"}, "auto", False, False),
        ({"device": "cuda"}, "cpu", True, False),
        ({"device": "cpu"}, "auto", True, True),
        ({"device": "cpu"}, "cuda", True, False),
        ({"device": "cpu, cuda"}, "cuda", True, True),
    ],
)
def test_devices(requires: dict[str, str], device: str, gpu: bool, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_cuda", lambda: gpu)
    variant = archive([Made("a", requires=requires)]).variant()
    assert (obstacle(variant, Settings(device=device)) == "") is runs


@pytest.mark.parametrize(("has", "runs"), [(True, True), (False, False)])
def test_bfloat16_needs_a_processor_that_has_it(has: bool, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_bf16", lambda: has)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    variant = archive([Made("a", requires={"engine": "openvino", "inference_precision": "bf16"})]).variant()
    assert (obstacle(variant, Settings(device="cpu")) == "") is runs


@pytest.mark.parametrize("requires", [{"inference_precision": "tf32"}, {"engine": "tensorrt"}])
def test_what_only_gpus_compute_needs_one(requires: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    variant = archive([Made("a", requires=requires)]).variant()
    for device, gpu, runs in (
        ("auto", True, True),
        ("cuda:0", True, True),
        ("cpu", True, False),
        ("auto", False, False),
    ):
        monkeypatch.setattr(devices, "has_cuda", lambda gpu=gpu: gpu)
        assert (obstacle(variant, Settings(device=device)) == "") is runs


def test_batches_are_captured_for_pytorch_unless_that_is_off() -> None:
    limits = Limits(max_batch=32)
    captured = GraphOptions(most=32, batch="batch", padded=True)
    for choice, form, expected in (
        ("auto", "pt2", captured),
        ("auto", "aoti", captured),
        ("auto", "onnx", None),
        ("on", "onnx", captured),
        ("off", "pt2", None),
    ):
        settings = Settings(cuda_graphs=choice, limits=limits)  # type: ignore[arg-type]
        assert graphs_for(form, "batch", settings, padded=True) == expected


def test_what_tensorrt_compiles_is_kept_next_to_the_store_only(tmp_path: Path) -> None:
    packed, store = archive([Made("a")]), Store(tmp_path)
    assert tensorrt_cache(packed.variant(), Settings()) is None
    store.push(packed, "double:1")
    variant = store.get("double:1").variant()
    found = tensorrt_cache(variant, Settings())
    assert found == tmp_path / "derived" / variant.descriptor.hex / ".tensorrt"
    found.mkdir(parents=True)
    (found / "graph.engine").write_bytes(b"compiled")
    assert list(DerivedCache(tmp_path / "derived").entries()) == []
    assert tensorrt_cache(variant, Settings(derived_cache=False)) is None


def test_a_gpu_variant_is_not_served_by_an_engine_that_fell_back_to_the_cpu(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    choice = choose(archive([Made("bf16", requires={"device": "cuda"}), Made("fp32", 2)]), Settings(device="auto"))
    assert choice.spec.variant == "fp32"
    assert engines.open == ["fp32"]


def test_batches_that_would_take_too_long_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 0.5

    ticks = clock()
    monkeypatch.setattr("ingot.runtime.profiling.profile.time.perf_counter", lambda: next(ticks))
    engine = FunctionEngine(lambda inputs: {"y": inputs["x"]}, SIGNATURE)
    (costs,) = comparison.measured([engine], SIGNATURE, RIGHT.inputs, 64, 0.3)
    assert list(costs) == [1]
    (costs,) = comparison.measured([engine], SIGNATURE, RIGHT.inputs, 4, 10.0)
    assert list(costs) == [1, 4]
