from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ingot.quant.data.samples import Samples
from ingot.quant.schemes import plan as plans
from ingot.quant.schemes.plan import Plan, Scheme
from ingot.quant.search import sensitivity
from ingot.quant.search.sensitivity import Noise
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random, sqnr
from tests.quant.networks import NETWORKS

WIDTH = 24


def ranked(model: Any, data: Mapping[str, Array], scheme: Scheme = "static", **options: Any) -> list[Noise]:
    source = graphs.source_of(model)
    plan = Plan("p", {}).but(plans.fitting(source, scheme), scheme)
    samples = Samples.read(source.signature, data)
    return sensitivity.rank(source, plan, graphs.observed(source, samples), samples, **options)


def chain(spread: Sequence[float]) -> tuple[Any, dict[str, Array]]:
    """Return a chain of products. Before each, one channel is larger by a factor that its weights cancel."""
    weights: dict[str, Array] = {}
    nodes, value = [], "x"
    for index, factor in enumerate(spread):
        scale = np.ones(WIDTH, np.float32)
        scale[index] = factor
        weights[f"s{index}"] = scale
        weights[f"w{index}"] = random(WIDTH, WIDTH, seed=index, scale=0.3) / scale[:, None]
        nodes.append(
            f"m{index} = Mul({value}, s{index}) p{index} = MatMul(m{index}, w{index}) t{index} = Tanh(p{index})"
        )
        value = f"t{index}"
    text = f"(float[batch,{WIDTH}] x) => (float[batch,{WIDTH}] y) {{ {' '.join(nodes)} y = Identity({value}) }}"
    return graphs.graph(text, weights), {"x": random(64, WIDTH, seed=99)}


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    first, second = (np.argsort(np.argsort(values)) for values in (left, right))
    return float(np.corrcoef(first, second)[0, 1])


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_a_layer_that_was_made_bad_comes_first(bad: int, scheme: Scheme) -> None:
    model, data = chain([200.0 if index == bad else 1.0 for index in range(5)])
    found = ranked(model, data, scheme)
    assert found[0].layer == f"MatMul_p{bad}"
    assert found[0].damage is not None
    assert found[1].damage is not None
    assert found[0].damage > 20 * found[1].damage
    assert found[0].sqnr < min(noise.sqnr for noise in found[1:]) - 20


@pytest.mark.matrix
@pytest.mark.parametrize("scheme", ["static", "dynamic", "int8", "int4"])
def test_it_is_what_quantizing_one_layer_after_the_other_finds(scheme: Scheme) -> None:
    model, data = chain([1, 30, 3, 100, 10, 1.5, 60, 6])
    source = graphs.source_of(model)
    seen = graphs.observed(source, data)
    expected = graphs.answers(model, data)["y"]
    alone = {
        name: -sqnr(expected, graphs.answers(plans.make(source, Plan("p", {name: scheme}), seen), data)["y"])
        for name in source.names
    }
    found = {noise.layer: noise.damage or 0.0 for noise in ranked(model, data, scheme)}
    assert set(found) == set(alone)
    # Large activations do not harm weights, so with weights alone all layers are much the same.
    assert spearman([alone[name] for name in found], list(found.values())) > (0.9 if scheme != "int8" else 0.6)
    if scheme in ("static", "dynamic"):
        decibels = [-10 * np.log10(found[name]) for name in alone]
        assert np.abs(np.array(decibels) + list(alone.values())).max() < 3


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.one_case
def test_all_kinds_of_networks(name: str) -> None:
    for network in (NETWORKS[name], NETWORKS[name].half()):
        model = network.model()
        source = graphs.source_of(model)
        for scheme in ("static", "dynamic", "int8", "int4"):
            found = ranked(model, network.inputs, scheme)
            assert {noise.layer for noise in found} == set(plans.fitting(source, scheme))
            for noise in found:
                assert 5 < noise.sqnr < 80
                assert noise.damage is not None
                assert 1e-9 < noise.damage < 0.1


def test_an_lstm_and_several_outputs() -> None:
    model = graphs.graph(
        "(float[n,batch,5] x) => (float[n,1,batch,6] y, float[1,batch,6] h, float[n,batch,3] z) "
        "{ y, h = LSTM<hidden_size=6>(x, w, r, b) z = MatMul(x, v) }",
        {
            "w": random(1, 24, 5, seed=1),
            "r": random(1, 24, 6, seed=2),
            "b": random(1, 48, seed=3),
            "v": random(5, 3, seed=4),
        },
    )
    found = ranked(model, {"x": random(7, 9, 5, seed=5)}, "dynamic")
    assert {noise.layer for noise in found} == {"LSTM_y", "MatMul_z"}
    assert all(noise.damage and noise.damage > 0 for noise in found)


def test_the_worst_output_counts() -> None:
    model = graphs.graph(
        "(float[batch,8] x) => (float[batch,4] a, float[batch,4] b, int64[batch] label) "
        "{ a = MatMul(x, w) b = MatMul(x, v) label = ArgMax<axis=1, keepdims=0>(a) }",
        {"w": random(8, 4), "v": random(8, 4, seed=1)},
    )
    found = {noise.layer: noise.damage for noise in ranked(model, {"x": random(30, 8)}, "int4")}
    assert all(damage and damage > 1e-4 for damage in found.values())


def test_without_effects_it_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = chain([1, 30, 3])
    calls: list[int] = []

    def counted(spec: EngineSpec) -> Any:
        engine = load_engine(spec)
        run = engine.run

        def one(inputs: Mapping[str, Array]) -> dict[str, Array]:
            calls.append(1)
            return run(inputs)

        monkeypatch.setattr(engine, "run", one)
        return engine

    monkeypatch.setattr(sensitivity, "load_engine", counted)
    whole = ranked(model, data)
    assert len(calls) == 4
    calls.clear()
    found = ranked(model, data, effects=False)
    assert len(calls) == 1
    assert [noise.damage for noise in found] == [None] * 3
    assert {noise.layer: noise.sqnr for noise in found} == {noise.layer: noise.sqnr for noise in whole}
    assert [noise.sqnr for noise in found] == sorted(noise.sqnr for noise in found)


def test_the_ranking_depends_on_the_seed_alone() -> None:
    model, data = chain([1, 30, 3])
    assert ranked(model, data, seed=3) == ranked(model, data, seed=3)
    steps: list[tuple[int, int]] = []
    ranked(model, data, progress=lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_an_overflow_in_half_precision_is_the_worst_and_stays_behind_its_gate() -> None:
    model = graphs.graph(
        "(float16[batch,8] x) => (float16[batch,4] y) { a = MatMul(x, w) c = Div(a, large) y = MatMul(c, v) }",
        graphs.halves(
            {
                # Rounded to 4 bits, 9000 becomes 9320, and the sum of eight of them is beyond 65504.
                "w": np.tile(np.array([[8100], [8100], [8100], [8100], [8100], [8100], [7950], [5000]]), (1, 4)).astype(
                    np.float32
                ),
                "large": np.array(60000, np.float32),
                "v": random(4, 4),
            }
        ),
    )
    data = {"x": np.ones((4, 8), np.float16)}
    found = ranked(model, data, "int4")
    assert all(noise.damage is not None and not np.isnan(noise.damage) for noise in found)
    assert all(np.isfinite(noise.sqnr) for noise in found)
    other = next(noise for noise in found if noise.layer == "MatMul_y")
    assert other.damage is not None
    assert other.damage < 0.1
