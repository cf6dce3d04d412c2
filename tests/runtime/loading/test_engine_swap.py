"""The swap of engines by itself; test_prepacked.py tests its effect on models and the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.model_store import CacheEntry, DerivedCache
from ingot.runtime import Engine
from ingot.runtime.loading.engine_swap import EngineSwap
from ingot.runtime.loading.prepacked import Prepacked
from ingot.tensors import DType, TensorSpec
from tests.runtime.fake_engines import DOUBLER, FunctionEngine


class Saved:
    """A saved form that exists and opens as a test sets."""

    def __init__(self, folder: Path, opens: Callable[[], Engine] = FunctionEngine):
        self.opens = opens
        self.opened: list[Any] = []
        self.whole: list[FunctionEngine] = []
        self._entry = DerivedCache(folder).entry("a" * 64, "test")
        self._entry.build(lambda folder: (folder / "model.onnx").touch(), 1)

    def entry(self) -> CacheEntry:
        return self._entry

    def open_saved(self, entry: CacheEntry, threads: int) -> Engine:
        self.opened.append(self.opens())
        return self.opened[-1]  # type: ignore[no-any-return]

    def open_whole(self, threads: int) -> Engine:
        self.whole.append(FunctionEngine())
        return self.whole[-1]


def engine_swap(
    saved: Saved, engines: list[FunctionEngine], done: list[str], test: Callable[[Engine], None] = lambda engine: None
) -> EngineSwap:
    return EngineSwap(cast("Prepacked", saved), engines, threads=1, test=test, done=done.append, name="net")


def closed(engines: list[Any]) -> list[bool]:
    return [engine.closed for engine in engines]


def test_every_engine_is_replaced_and_closed(tmp_path: Path) -> None:
    saved, engines, done = Saved(tmp_path), [FunctionEngine(), FunctionEngine()], list[str]()
    change = engine_swap(saved, engines, done)
    change.start()
    assert change.wait(60)
    assert done == ["hit"]
    assert [place.current for place in change.engines] == saved.opened
    assert (closed(engines), closed(saved.opened)) == ([True, True], [False, False])


OTHER = replace(DOUBLER, outputs=(TensorSpec("z", DType.FP32, ("batch", 2)),))


def refuse(engine: Engine) -> None:
    if not np.array_equal(engine.run({"x": np.ones((1, 2), np.float32)})["y"], [[2, 2]]):
        raise InvalidArgument("it answers otherwise")


@pytest.mark.parametrize(
    "opens",
    [
        lambda: FunctionEngine(signature=OTHER),
        lambda: FunctionEngine(lambda inputs: {"y": inputs["x"] * 3}),
    ],
    ids=["another-signature", "other-answers"],
)
def test_a_form_of_another_model_is_closed_and_its_files_are_removed(
    tmp_path: Path, opens: Callable[[], Engine]
) -> None:
    saved, engines, done = Saved(tmp_path, opens), [FunctionEngine()], list[str]()
    change = engine_swap(saved, engines, done, refuse)
    change.start()
    assert change.wait(60)
    assert done == ["failed"]
    assert closed(saved.opened) == [True]
    assert not saved.entry().find()
    assert [place.current for place in change.engines] == saved.whole


def test_once_it_is_closed_no_engine_is_opened(tmp_path: Path) -> None:
    saved, engines, done = Saved(tmp_path), [FunctionEngine()], list[str]()
    change = engine_swap(saved, engines, done)
    change.close()
    change.start()
    assert change.wait(60)
    assert (saved.opened, saved.whole, done, closed(engines)) == ([], [], [], [False])


def test_an_engine_that_is_being_opened_when_the_model_ends_is_closed_and_no_other_follows(tmp_path: Path) -> None:
    opening, leave = threading.Event(), threading.Event()

    def slowly() -> Engine:
        opening.set()
        leave.wait(60)
        return FunctionEngine()

    saved, engines, done = Saved(tmp_path, slowly), [FunctionEngine(), FunctionEngine()], list[str]()
    change = engine_swap(saved, engines, done)
    change.start()
    assert opening.wait(60)
    change.close(timeout=0.01)
    for place in change.engines:
        place.close()
    leave.set()
    assert change.wait(60)
    assert (closed(saved.opened), closed(engines), done, saved.whole) == ([True], [True, True], [], [])
