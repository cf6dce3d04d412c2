"""The pass manager: the rules that it runs, proves and skips, and the selection of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from ingot.errors import ExportError, InvalidArgument, ParityError
from ingot.export.rewrite import rules
from ingot.export.rewrite.passes.fx_graph import Memory
from ingot.export.rewrite.passes.manager import FxPass, PassManager, PassRecord, PassResult

aten = torch.ops.aten
X = torch.arange(4.0)


class Swap(FxPass):
    """Replaces one operator by another."""

    def __init__(self, name: str, old: Any, new: Any, requires: Callable[[], None] = lambda: None):
        self.name = name  # type: ignore[misc]
        self._old, self._new, self._requires = old, new, requires

    def requires(self, graph: fx.GraphModule) -> None:
        self._requires()

    def call(self, graph: fx.GraphModule) -> PassResult[fx.GraphModule]:
        nodes = [node for node in graph.graph.nodes if node.target is self._old]
        for node in nodes:
            node.target = self._new
        return PassResult(graph, len(nodes))


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.neg(torch.abs(x))


def captured() -> fx.GraphModule:
    return torch.export.export(Model(), (X,)).module()


def run(*passes: FxPass) -> tuple[fx.GraphModule, tuple[PassRecord, ...]]:
    expected = Model()(X)

    def prove(graph: fx.GraphModule) -> float:
        error = float((graph(X) - expected).abs().max())
        if error > 0.5:
            raise ParityError(f"departs by {error}")
        return error

    return PassManager(passes, prove).run(captured())


def targets(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.matrix
def test_passes_run_in_order_each_on_what_the_one_before_made() -> None:
    first = Swap("first", aten.abs.default, aten.relu.default)
    second = Swap("second", aten.relu.default, aten.clone.default)
    graph, records = run(first, second)
    assert targets(graph)[0] == "aten.clone.default"
    assert records == (PassRecord("first", "fx", 1, 0.0), PassRecord("second", "fx", 1, 0.0))


def test_a_pass_that_makes_the_graph_wrong_is_left_out_and_the_next_gets_the_good_one() -> None:
    graph, (bad, good) = run(
        Swap("bad", aten.neg.default, aten.relu.default), Swap("good", aten.abs.default, aten.clone.default)
    )
    assert targets(graph) == ["aten.clone.default", "aten.neg.default"]
    assert (bad.matches, bad.error, bad.rejected) == (1, None, "ParityError: departs by 6.0")
    assert good.rejected == ""


def test_a_pass_that_cannot_run_or_fails_is_left_out() -> None:
    def unfit() -> None:
        raise ExportError("no such graph")

    def faulty() -> None:
        raise KeyError("a mistake of its author")

    graph, records = run(Swap("unfit", aten.abs.default, aten.relu.default, unfit), Swap("faulty", None, None, faulty))
    assert targets(graph) == targets(captured())
    assert [record.rejected for record in records] == [
        "ExportError: no such graph",
        "KeyError: 'a mistake of its author'",
    ]


def test_a_pass_without_changes_is_not_proved() -> None:
    def never(graph: fx.GraphModule) -> float:
        raise AssertionError

    _, records = PassManager([Swap("idle", aten.exp.default, aten.abs.default)], never).run(captured())
    assert records == (PassRecord("idle", "fx", 0),)


def test_rules_are_chosen_by_name_and_the_users_run_first() -> None:
    own = Swap("own", None, None)
    fx_rules, onnx_rules = rules.select([own, "dequant-matmul"])
    assert [rule.name for rule in fx_rules] == ["own", "dequant-matmul"]
    assert [rule.name for rule in onnx_rules] == ["dequant-matmul"]
    assert rules.select(["none"]) == ((), ())
    (default_fx, default_onnx), (all_fx, all_onnx) = rules.select(["default"]), rules.select(["all"])
    assert set(default_fx) <= set(all_fx)
    assert set(default_onnx) < set(all_onnx)
    with pytest.raises(InvalidArgument, match=r"there is no rule 'conv-bm'; the rules are: .*attention, .*conv-bn"):
        rules.select(["conv-bm"])


class EntryPoint:
    """An entry point as ``importlib.metadata`` returns it."""

    name = "theirs"

    def __init__(self, value: Any):
        self._value = value

    def load(self) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def test_rules_of_installed_packages_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(value: Any) -> None:
        monkeypatch.setattr(rules, "entry_points", lambda group: [EntryPoint(value)])

    theirs = Swap("theirs", None, None)
    for value in (theirs, [theirs]):
        installed(value)
        assert rules.select()[0][0] is theirs or theirs in rules.select()[0]
    installed(ImportError("no module named 'gone'"))
    with pytest.raises(InvalidArgument, match="entry point 'theirs' cannot be loaded: no module named 'gone'"):
        rules.select()
    installed("not a pass")
    with pytest.raises(InvalidArgument, match="entry point 'theirs' holds a str, which is not a pass"):
        rules.select()


def test_memory_knows_what_views_share_and_who_writes() -> None:
    class Writing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            y.view(2, 2)[0].mul_(2)
            return y * torch.exp(x)

    graph = torch.export.export(Writing(), (X,)).module().graph
    by_name = {node.name: node for node in graph.nodes}
    memory = Memory(graph)
    assert memory.writers(by_name["add"]) == [by_name["mul_"]]
    assert memory.writers(by_name["exp"]) == []
    assert not memory.unchanged({by_name["add"], by_name["mul"]}, by_name["mul"])
    assert memory.unchanged({by_name["exp"], by_name["mul"]}, by_name["mul"])
