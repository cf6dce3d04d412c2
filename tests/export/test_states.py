"""State that a model changes: lifted to inputs and outputs, and fed back over several calls, or refused."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import ExportError, ParityError
from ingot.export import export_model
from ingot.export.snapshot import untouched
from ingot.model_store import Archive
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.tensors import Array, parse_spec
from tests.export import fingerprint, models
from tests.export.stateful import CASES, Case
from tests.support import RunIngot

ROWS = ["x:float32[batch,4]"]


class Average(nn.Module):
    """A running average kept in two buffers, one changed in place and one replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.mean: torch.Tensor
        self.register_buffer("count", torch.full((), 2.0))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = self.mean + (x.mean(0) - self.mean) / self.count
        return x - self.mean


class Attribute(nn.Module):
    """A state that is not a buffer and thus cannot be lifted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


@pytest.mark.matrix
def test_a_lifted_state_follows_the_module_over_several_calls() -> None:
    module = Average()
    original = copy.deepcopy(module)
    archive = export_model(module, inputs=ROWS, lift_state=True)
    assert [spec.name for spec in archive.signature.inputs] == ["x", "count", "mean"]
    assert [spec.name for spec in archive.signature.outputs] == ["output", "count_next", "mean_next"]
    assert archive.signature.batch is None  # a state belongs to one caller
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    first = archive.variant().goldens()[0].inputs
    state = {"count": first["count"], "mean": first["mean"]}  # the state that the module was exported with
    for seed in range(4):
        x = np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32)
        answer = engine.run({"x": x, **state})
        assert np.allclose(answer["output"], original(torch.tensor(x)).numpy(), atol=1e-6)
        state = {name: answer[f"{name}_next"] for name in state}
    engine.close()


@pytest.mark.matrix
def test_the_export_leaves_the_state_of_the_module_alone() -> None:
    module = Average()
    export_model(module, inputs=ROWS, lift_state=True)
    assert module.count.item() == 2
    assert module.mean.tolist() == [1, 1, 1, 1]


@pytest.mark.matrix
def test_an_overwritten_input_becomes_an_output() -> None:
    archive = export_model(models.Function(lambda x: x.add_(1) * 2), inputs=ROWS, lift_state=True)
    assert [spec.name for spec in archive.signature.outputs] == ["output", "x_next"]
    engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
    answer = engine.run({"x": np.zeros((1, 4), np.float32)})
    engine.close()
    assert answer["output"].tolist() == [[2, 2, 2, 2]]
    assert answer["x_next"].tolist() == [[1, 1, 1, 1]]


def test_without_the_option_it_is_refused_by_name() -> None:
    with pytest.raises(ExportError, match=r"changes count, mean while it runs.*--lift-state"):
        export_model(Average(), inputs=ROWS)


def test_a_state_outside_of_buffers_is_named() -> None:
    with pytest.raises(ParityError, match="attribute 'calls' changes at each call; register it as a buffer"):
        export_model(Attribute(), inputs=ROWS, lift_state=True)


@pytest.mark.matrix
def test_the_command_line_lifts_too(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot(
        "export",
        "tests.export.test_states:Average",
        "--input",
        ROWS[0],
        "--lift-state",
        "-o",
        str(tmp_path / "a.ingot"),
    )
    assert result.returncode == 0, result.stderr
    assert "count_next: equals the original" in result.stderr


class Scratch(nn.Module):
    """Keeps a value in buffers that each call starts from zero, as networks of spiking neurons do."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.membrane: torch.Tensor
        self.total: torch.Tensor
        self.register_buffer("membrane", torch.zeros(0))
        self.register_buffer("total", torch.zeros(4))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.total.clone() if self.reads else x
        self.membrane = torch.zeros_like(x)
        self.total.zero_()
        for _ in range(2):
            self.membrane = self.membrane * 0.9 + x
            self.total.add_(1)
        return torch.where(x > 1e9, before, self.membrane * self.total)  # no input of the proof is so large


@pytest.mark.matrix
@pytest.mark.parametrize("lift_state", [False, True])
def test_a_buffer_that_is_overwritten_first_is_not_a_state(lift_state: bool) -> None:
    module = Scratch()
    archive = export_model(module, inputs=ROWS, lift_state=lift_state)
    assert [str(spec) for spec in archive.signature.inputs] == ["x:float32[batch,4]"]
    assert any(
        "overwrites membrane, total before it reads" in note for note in archive.variant().serving.provenance.notes
    )
    assert module.membrane.shape == (0,)
    assert not module.total.any()


@pytest.mark.matrix
def test_a_buffer_that_is_read_on_rare_inputs_is_a_state() -> None:
    with pytest.raises(ExportError, match="changes total while it runs, and may read the value of an earlier call"):
        export_model(Scratch(reads=True), inputs=ROWS)


# The cases that `make test` runs: one for each mechanism.
_USUAL = {
    "peak that large values raise",
    "counter written through a view",
    "one buffer lifted, one attribute dropped",
    "counter in a closure",
    "peak in a Python number",
    "containers with other methods",
    "number of the file",
    "numpy array that is read only",
    "ActNorm with a flag",
    "buffer registered by the first call",
    "lazy layer",
    "parameter multiplied by 1 in .data",
    "parameter that decays",
    "LoRA that merges in eval",
    "hook before the root",
    "decorator without the names",
    "environment and warnings",
    "frozen by the first call",
}
# Ordinary values, others, large ones and small ones at another size: the seed, the scale and the batch.
_CALLS = ((0, 1.0, 3), (1, 1.0, 3), (2, 1000.0, 2), (3, 0.01, 5))
_ORDERS = ((0, 1, 2, 3, 0, 1), (2, 0, 1, 3, 0))


@pytest.mark.one_case
@pytest.mark.parametrize("lift_state", [False, True], ids=["", "lifted"])
@pytest.mark.parametrize(
    "title", [title if title in _USUAL else pytest.param(title, marks=pytest.mark.matrix) for title in CASES]
)
def test_a_module_is_served_as_it_answers_or_refused_and_stays_as_it_was(title: str, lift_state: bool) -> None:
    case = CASES[title]
    refused = case.refused if not lift_state or case.lifted is None else case.lifted or None
    torch.manual_seed(0)
    module = case.make()
    before = fingerprint.of_module(module), fingerprint.of_process()
    archive: Archive | None = None
    with pytest.raises(ExportError, match=refused) if refused is not None else contextlib.nullcontext():
        archive = export_model(module, inputs=case.inputs, lift_state=lift_state)
    after = fingerprint.of_module(module), fingerprint.of_process()
    assert before == after
    if archive is not None:
        with contextlib.closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
            for order in _ORDERS:
                _check_served(engine, archive, case, order)


def _check_served(engine: Engine, archive: Archive, case: Case, order: Sequence[int]) -> None:
    """Compare calls in a row of a module that was never exported with those of its graph."""
    torch.manual_seed(0)
    module = case.make().eval()
    first = archive.variant().goldens()[0].inputs
    state = {name: first[name] for name in first if f"{name}_next" in {spec.name for spec in archive.signature.outputs}}
    output = archive.signature.outputs[0].name
    with untouched(module):  # some cases change the process
        for call in order:
            inputs = _drawn(case, *_CALLS[call])
            with torch.no_grad():
                expected = _called(module, inputs).detach().numpy()
            answer = engine.run({**state, **inputs})
            state |= {name.removesuffix("_next"): value for name, value in answer.items() if name.endswith("_next")}
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(answer[output], expected, rtol=1e-4, atol=1e-6 * scale)


def _called(module: torch.nn.Module, inputs: Mapping[str, Array]) -> torch.Tensor:
    """Call a module by position where its first parameters are the inputs, otherwise by name."""
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    names = list(inspect.signature(module.forward).parameters)[: len(tensors)]
    named = set(names) == set(tensors) or not set(tensors) <= set(inspect.signature(module.forward).parameters)
    return module(*tensors.values()) if named else module(**tensors)  # type: ignore[no-any-return]


def _drawn(case: Case, seed: int, scale: float, rows: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    for spec, _ in map(parse_spec, case.inputs):
        shape = [dim if isinstance(dim, int) else {"batch": rows}.get(dim, 7 * rows) for dim in spec.shape]
        values = rng.standard_normal(shape) * scale if spec.values is None else rng.integers(0, 5, shape)
        drawn[spec.name] = values.astype(spec.dtype.numpy)
    return drawn


class Unreadable:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise SystemExit(3)


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.matrix
def test_attributes_that_cannot_be_read_are_left_alone() -> None:
    module = nn.Linear(4, 2)
    endless: list[Any] = []
    endless.append(endless)
    deleted = weakref.proxy(Unprintable())
    others = [random.SystemRandom(), Unreadable(), {Unprintable(): [1]}, endless, deleted]
    module.others = others  # type: ignore[assignment]
    export_model(module, inputs=ROWS)
    assert vars(module)["others"] is others
    assert others[3] is endless


def test_a_value_that_cannot_be_restored_is_refused_unless_the_model_failed() -> None:
    def change(log: np.ndarray[Any, Any], error: Exception | None = None) -> None:
        module = nn.Linear(4, 2)
        module.log = log  # type: ignore[assignment]
        with untouched(module):
            log += 1
            log.flags.writeable = False
            if error is not None:
                raise error

    with pytest.raises(ExportError, match=r"changes log in a way that cannot be undone .*keep such values in tensors"):
        change(np.zeros(3))
    with pytest.raises(ValueError, match="of the model"):
        change(np.zeros(3), ValueError("of the model"))
