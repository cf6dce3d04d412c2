"""State, hooks, batches and padding together: the answer is right or refused, and the module stays as it was."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.model_store import Archive
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.tensors import Array
from tests.export import fingerprint
from tests.export.composed import ALONG, BATCHES, COMPOSITIONS, INPUTS, STATES, WAYS, Composition

# Sizes [batch, seq] and the scale of the values, call after call; sizes of requests that share a batch; lengths and
# those that they are padded to.
_CALLS = ((3, 5, 1.0), (2, 9, 4.0), (1, 1, 1.0), (4, 33, 0.1), (20, 5, 1.0), (3, 5, 1.0))
_JOINED = ((1, 2, 1), (17, 1), (1, 30))
_PADDED = ((1, 4), (5, 6), (7, 16), (15, 40), (12, 300))


def test_each_part_meets_each_part_of_another_kind() -> None:
    kinds = (STATES, WAYS, BATCHES, ALONG)
    assert len(COMPOSITIONS) >= 250
    for (left, ones), (right, others) in itertools.combinations(enumerate(kinds), 2):
        parts = [(item.state, item.way, item.batch, item.along) for item in COMPOSITIONS]
        met = {(chosen[left].name, chosen[right].name) for chosen in parts}
        assert len(met) == len(ones) * len(others)


@pytest.mark.parametrize(
    "composition",
    [
        pytest.param(item, id=item.title, marks=pytest.mark.matrix if place % 30 == 0 else pytest.mark.long)
        for place, item in enumerate(COMPOSITIONS)
    ],
)
def test_a_module_is_served_as_it_answers_or_refused_and_stays_as_it_was(composition: Composition) -> None:
    module = composition.make()
    before = fingerprint.of_module(module)
    archive: Archive | None = None
    pad = "seq" if composition.along.padded else ()
    reason = ""
    try:
        archive = export_model(module, inputs=INPUTS, lift_state=True, pad=pad)
    except ExportError as error:
        reason = str(error)
    assert fingerprint.of_module(module) == before
    if composition.state.refused is not None:
        assert composition.state.refused in reason
    elif archive is None:
        assert composition.along.padded
        assert "padding along 'seq'" in reason
    if archive is not None:
        with contextlib.closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
            _check_calls(engine, archive, composition)
            _check_batches(engine, archive, composition)
            _check_padding(engine, archive, composition)


def _check_calls(engine: Engine, archive: Archive, composition: Composition) -> None:
    """Compare calls in a row with those of a module that was never exported."""
    module, state = composition.make().eval(), _states(archive)
    for seed, (rows, length, scale) in enumerate(_CALLS):
        inputs = _drawn(seed, rows, length, scale)
        answer = engine.run({**state, **inputs})
        state = {name: answer[f"{name}_next"] for name in state}
        _compare(archive, answer, _called(module, inputs))


def _check_batches(engine: Engine, archive: Archive, composition: Composition) -> None:
    """Compare requests that share a batch with each alone."""
    apart = composition.state.apart and composition.batch.apart
    if not composition.state.kept:
        assert (archive.signature.batch == "batch") == apart
    if archive.signature.batch is None or composition.state.kept:
        return
    for sizes in _JOINED:
        requests = [_drawn(seed, rows, 6, 2.0) for seed, rows in enumerate(sizes)]
        joined = {name: np.concatenate([request[name] for request in requests]) for name in requests[0]}
        expected = np.concatenate([_called(composition.make().eval(), request) for request in requests])
        _compare(archive, engine.run(joined), expected)


def _check_padding(engine: Engine, archive: Archive, composition: Composition) -> None:
    """Compare requests that are padded with the same ones as they are."""
    if "seq" not in archive.variant().serving.padding:
        return
    state = _states(archive)
    for seed, (length, longer) in enumerate(_PADDED):
        inputs = _drawn(seed, 3, length, 1.0)
        padded = {
            name: np.pad(value, [(0, 0), (0, longer - length)] + [(0, 0)] * (value.ndim - 2))
            for name, value in inputs.items()
        }
        _compare(archive, engine.run({**state, **padded}), _called(composition.make().eval(), inputs))


def _states(archive: Archive) -> dict[str, Array]:
    first = archive.variant().goldens()[0].inputs
    return {name: value for name, value in first.items() if name not in ("x", "mask")}


def _called(module: torch.nn.Module, inputs: Mapping[str, Array]) -> Array:
    with torch.no_grad():
        answer: Array = module(*map(torch.from_numpy, inputs.values())).numpy()
    return answer


def _drawn(seed: int, rows: int, length: int, scale: float) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (rows, length))
    mask[:, 0] = 1
    return {"x": (rng.standard_normal((rows, length, 4)) * scale).astype(np.float32), "mask": mask}


def _compare(archive: Archive, answer: Mapping[str, Array], expected: Array) -> None:
    outputs: Sequence[str] = [spec.name for spec in archive.signature.outputs]
    np.testing.assert_allclose(answer[outputs[0]], expected, rtol=1e-4, atol=1e-5)
