from __future__ import annotations

import asyncio
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import InternalError, InvalidArgument
from ingot.model_store import Archive, CacheEntry, Store
from ingot.runtime import Engine, Metrics, Model, Settings
from ingot.runtime.loading import prepacked
from ingot.runtime.loading.prepacked import Prepacked
from ingot.serving import Repository
from ingot.tensors import Array
from tests.runtime import large_models
from tests.runtime.large_models import MODELS

Answers = list[Array]
ROWS = (1, 3, 8)


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "MIN_BYTES", 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def layers(store: Store) -> Archive:
    return large_models.push(store)


class Served:
    """A loaded model that answers; ``results`` are the cache's counts."""

    def __init__(self, store: Store, name: str = "layers", settings: Settings | None = None):
        self.metrics = Metrics()
        self.model: Model = Repository(store, settings or Settings(), self.metrics).add(f"{name}:1")
        self.model.load()

    def settle(self) -> Served:
        assert self.model.settle(120)
        return self

    def answers(self) -> Answers:
        async def ask() -> Answers:
            asked = [large_models.inputs(self.model.signature, samples) for samples in ROWS]
            return [(await self.model.infer(inputs))["y"] for inputs in asked]

        return asyncio.run(ask())

    @property
    def results(self) -> dict[str, float]:
        (metric,) = self.metrics.derived_cache.collect()
        return {s.labels["result"]: s.value for s in metric.samples if s.name.endswith("_total")}

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close(60)


def whole(store: Store, name: str = "layers") -> Answers:
    """Return the answers of the model loaded without the cache."""
    with Served(store, name, Settings(derived_cache=False)) as served:
        return served.answers()


def result(store: Store, name: str = "layers") -> str:
    """Load the model, compare its answers with those without the cache, and return the cache's count."""
    expected = whole(store, name)
    with Served(store, name) as served:
        check(served.settle().answers(), expected)
        (counted,) = served.results
        return counted


def check(answers: Answers, expected: Answers) -> None:
    for answer, right in zip(answers, expected, strict=True):
        np.testing.assert_array_equal(answer, right, strict=True)


def entry(store: Store) -> CacheEntry:
    (path,) = (path for path in store.root.glob("derived/*/*") if path.is_dir())
    return CacheEntry(path)


class TestAnswers:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.matrix
    def test_they_are_the_same_bits_with_the_cache_and_without(self, store: Store, name: str) -> None:
        large_models.push(store, MODELS[name])
        assert [result(store, name) for _ in range(2)] == ["built", "hit"]

    @pytest.mark.matrix
    def test_they_are_the_goldens_from_the_first_moment(
        self, store: Store, layers: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ingot.runtime.loading.engine_swap.EngineSwap.start", lambda self: None)
        expected = whole(store)
        with Served(store) as served:
            for answer, right in zip(served.answers(), expected, strict=True):
                np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-5)

    @pytest.mark.matrix
    def test_every_instance_changes_over(self, store: Store, layers: Archive) -> None:
        expected = whole(store)
        with Served(store, settings=Settings(instances=2)) as served:
            check(served.settle().answers(), expected)
            assert served.results == {"built": 1}

    @pytest.mark.matrix
    def test_requests_are_answered_while_engines_change(self, store: Store, layers: Archive) -> None:
        expected = whole(store)
        with Served(store) as served:
            rounds = 0
            while not served.model.settle(0) or rounds == 0:
                for answer, right in zip(served.answers(), expected, strict=True):
                    np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-5)
                rounds += 1
            check(served.answers(), expected)

    @pytest.mark.matrix
    def test_a_variant_that_was_timed_uses_the_cache_too(
        self, store: Store, layers: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "ingot.runtime.loading.load_spec.LoadSpec.start",
            lambda form, device, threads, model: (form.open(device, threads), False),
        )
        expected = whole(store)
        with Served(store) as served:
            check(served.answers(), expected)
            check(served.settle().answers(), expected)
            assert served.results == {"built": 1}


class TestWhereItIsUsed:
    def use(self, archive: Archive, **settings: object) -> Prepacked | None:
        return Prepacked.of_variant(archive.variant(), replace(Settings(device="cpu"), **settings))  # type: ignore[arg-type]

    def test_large_models_of_a_store_on_the_cpu(self, layers: Archive) -> None:
        assert self.use(layers) is not None
        assert self.use(layers, device="cuda") is None
        assert self.use(layers, derived_cache=False) is None

    def test_small_models_are_simply_loaded(self, layers: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepacked, "MIN_BYTES", 4 << 20)
        assert self.use(layers) is None

    def test_archive_files_are_simply_loaded(self, layers: Archive, tmp_path: Path) -> None:
        layers.save(tmp_path / "layers.ingot")
        assert self.use(Archive.open(tmp_path / "layers.ingot")) is None
        assert self.use(Archive.open(tmp_path / "layers.ingot").unpacked()) is None

    def test_the_entry_depends_on_engine_processor_and_library(
        self, layers: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = tmp_path / "library.so"
        library.write_bytes(b"one")
        keys = []
        for settings in ({}, {"ort_library": library}):
            used = self.use(layers, **settings)
            assert used is not None
            keys.append(used.entry().key)
        library.write_bytes(b"two")
        assert used is not None
        keys.append(used.entry().key)
        monkeypatch.setattr("ingot.runtime.machine.devices.cpu_features", lambda: "x86_64 of old")
        keys.append(used.entry().key)
        monkeypatch.setattr("ingot.runtime.engines.ort.ort_session.version", lambda: "another build")
        keys.append(used.entry().key)
        assert len(set(keys)) == 5


def cut_short(found: CacheEntry) -> None:
    os.truncate(found.path / "weights", 1 << 20)


def no_model(folder: Path) -> None:
    (folder / "model.onnx").write_text("no model")


def no_graph(found: CacheEntry) -> None:
    (found.path / "model.onnx").unlink()


class TestFaults:
    @pytest.fixture(autouse=True)
    def built(self, store: Store, layers: Archive) -> None:
        with Served(store) as served:
            served.settle()

    @pytest.mark.parametrize("damage", [cut_short, no_graph], ids=lambda damage: damage.__name__)
    @pytest.mark.matrix
    def test_a_damaged_entry_is_rebuilt(self, store: Store, damage: Callable[[CacheEntry], None]) -> None:
        damage(entry(store))
        assert result(store) == "built"
        entry(store).verify()

    @pytest.mark.matrix
    def test_an_entry_that_looks_whole_and_is_not_is_given_up(self, store: Store) -> None:
        made = entry(store)
        made.remove()
        made.build(no_model, 1)
        assert result(store) == "failed"
        assert result(store) == "built"

    @pytest.mark.matrix
    def test_an_entry_that_answers_otherwise_is_not_served(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        other = entry(store)
        other.remove()
        wrong = large_models.push(
            Store(store.root.parent / "other"), lambda folder: large_models.layers(folder, count=2)
        )
        used = Prepacked.of_variant(wrong.variant(), Settings())
        assert used is not None
        used.build(other)
        assert result(store) == "failed"

    @pytest.mark.matrix
    def test_it_can_be_deleted_while_it_is_served(self, store: Store) -> None:
        expected = whole(store)
        with Served(store) as served:
            served.settle()
            shutil.rmtree(store.root / "derived")
            check(served.answers(), expected)
        assert result(store) == "built"

    @pytest.mark.matrix
    def test_a_store_that_cannot_be_written_serves_what_it_has(self, store: Store) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        folders = [path for path in (store.root, *store.root.rglob("*")) if path.is_dir()]
        modes = [folder.stat().st_mode for folder in folders]
        for folder in folders:
            folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            assert result(store) == "hit"
        finally:
            for folder, mode in zip(folders, modes, strict=True):
                folder.chmod(mode)


class TestWithoutACache:
    @pytest.mark.matrix
    def test_a_store_that_cannot_be_written_is_served(
        self, store: Store, layers: Archive, caplog: pytest.LogCaptureFixture
    ) -> None:
        (store.root / "derived").write_text("in the way")
        with caplog.at_level("INFO"):
            assert result(store) == "failed"
        assert "model layers is served without the derived cache: " in caplog.text

    @pytest.mark.matrix
    def test_a_full_disk_is_left_alone(
        self, store: Store, layers: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        used = Prepacked.of_variant(layers.variant(), Settings())
        assert used is not None
        huge = replace(used, weights=1 << 60)
        monkeypatch.setattr(
            Prepacked, "of_variant", lambda variant, settings, isolation: huge if settings.derived_cache else None
        )
        with caplog.at_level("INFO"):
            assert result(store) == "failed"
        assert "No space left on device" in caplog.text

    def test_an_engine_that_needs_its_weights_packed_is_loaded_at_once(
        self, store: Store, layers: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise InternalError("it answers otherwise")

        monkeypatch.setattr(Prepacked, "entry", refuse)
        expected = whole(store)
        with Served(store) as served:
            check(served.answers(), expected)
            assert served.settle().results == {"failed": 1}

    @pytest.mark.matrix
    def test_if_no_saved_form_opens_the_engine_stays(
        self, store: Store, layers: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(*_: object) -> Engine:
            raise InvalidArgument("no memory")

        monkeypatch.setattr(Prepacked, "open_saved", refuse)
        monkeypatch.setattr(Prepacked, "open_whole", refuse)
        expected = whole(store)
        with Served(store) as served:
            served.settle()
            for answer, right in zip(served.answers(), expected, strict=True):
                np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-5)
        assert "model layers is served with unpacked weights: no memory" in caplog.text


class TestManyAtOnce:
    @pytest.mark.matrix
    def test_models_that_load_together_make_one_entry(self, store: Store, layers: Archive) -> None:
        expected = whole(store)
        served = [Served(store) for _ in range(3)]
        found: list[tuple[str, float]] = []
        for each in served:
            with each:
                check(each.settle().answers(), expected)
                found += each.results.items()
        assert found[0] == ("built", 1)
        assert set(found[1:]) <= {("built", 1), ("hit", 1)}  # on a slow machine the entry is there before they load
        assert len(found) == 3
        entry(store).verify()
        assert [path.suffix for path in entry(store).path.parent.iterdir() if path != entry(store).path] == [".lock"]

    def test_a_model_that_is_unloaded_does_not_wait_for_the_cache(
        self, store: Store, layers: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = Prepacked.of_variant(layers.variant(), Settings())
        assert used is not None
        building, leave = threading.Event(), threading.Event()

        def hold(folder: Path) -> None:
            building.set()
            leave.wait(60)
            (folder / "model.onnx").write_text("no model")

        with held(lambda: used.entry().build(hold, 1), building, leave), Served(store) as served:
            served.model.close(60)
            assert not served.results


@contextmanager
def held(work: Callable[[], object], began: threading.Event, leave: threading.Event) -> Iterator[None]:
    """Run work in a thread until the block ends; the block begins when the work has."""
    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join(60)
        assert not thread.is_alive()
