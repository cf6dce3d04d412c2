"""Each failure of torch.export is explained, and the suggested edit is applied and tried."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim

from ingot.errors import DeadlineExceeded, ExportError
from ingot.export import export_model
from ingot.export.diagnose import deep, draft
from ingot.export.diagnose.bisection import bisect_model
from ingot.export.diagnose.deep import Recipe, explain_deep
from ingot.export.explain import Explanation, explain
from ingot.export.program import quiet

COUNT = itertools.count()


class Workbench:
    """Writes models to files, tries to capture them, and makes the edits that are suggested."""

    def __init__(self, folder: Path):
        self._folder = folder

    def load(self, body: str) -> tuple[nn.Module, Path]:
        name = f"explained_{next(COUNT)}"
        path = self._folder / f"{name}.py"
        header = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
        path.write_text(header + body, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        return module.Net().eval(), path

    def repair(self, body: str, args: Sequence[torch.Tensor], times: int = 1) -> nn.Module:
        """Apply suggested edits until the model can be captured; return it with the capture as ``captured``."""
        for _ in range(times):
            explanation = why(self.load(body)[0], args)
            assert explanation.replacement, explanation.text()
            assert body.count(explanation.source) == 1
            body = body.replace(explanation.source, explanation.replacement)
        module = self.load(body)[0]
        module.captured = capture(module, args).module()
        return module


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path)


def capture(module: nn.Module, args: Sequence[torch.Tensor], strict: bool = False) -> torch.export.ExportedProgram:
    shapes = tuple({0: Dim("batch")} if arg.ndim > 1 else None for arg in args)
    with quiet(), torch.no_grad():
        return torch.export.export(module, tuple(args), dynamic_shapes=shapes, strict=strict)


def failure(module: nn.Module, args: Sequence[torch.Tensor], strict: bool = False) -> Exception:
    try:
        capture(module, args, strict)
    except Exception as error:  # noqa: BLE001 - any exception of torch is tested
        return error
    raise AssertionError("the capture succeeds, so there is nothing to explain")


def why(module: nn.Module, args: Sequence[torch.Tensor]) -> Explanation:
    """Explain as the capture does: the error of strict mode helps where the first error names no line."""
    first = failure(module, args)
    explanation = explain(first, module)
    told = explanation.replacement or not explanation.source.lstrip().startswith("def ")
    return explanation if told else explain(first, module, [failure(module, args, strict=True)])


def net(*lines: str, init: str = "") -> str:
    """Return the source of a module whose forward takes ``x`` and ``n``."""
    head = f"    def __init__(self):\n        super().__init__()\n        {init}\n\n" if init else ""
    body = textwrap.indent("\n".join(lines), " " * 8)
    return f"class Net(nn.Module):\n{head}    def forward(self, x, n=None):\n{body}\n"


def check(bench: Workbench, body: str, inputs: Sequence[Sequence[torch.Tensor]], times: int = 1) -> None:
    """Repair a model, and compare the capture of it with the original on all inputs."""
    original, _ = bench.load(body)
    captured: Any = bench.repair(body, inputs[0], times).captured
    with torch.no_grad():
        for args in inputs:
            expected, actual = original(*args), captured(*args)
            torch.testing.assert_close(actual, expected)


ROWS = [torch.linspace(-1, 2, 12).reshape(3, 4), -torch.ones(2, 4), torch.rand(1, 4), torch.randn(7, 4)]
ONE = [(x,) for x in ROWS]


class TestDecisions:
    @pytest.mark.parametrize(
        "lines",
        [
            ["if x.sum() > 0:", "    return x * 2", "return -x"],
            ["if x.sum() > 0:", "    return x", "else:", "    return x.view(-1, 4)"],
            [
                "if x.sum() > 0 and not (x > 1).all():",
                "    y = x + 1",
                "    y += x",
                "    return y",
                "return self.f(x)",
            ],
            ["y = x + 1", "if x.mean() > 0: y = self.f(y)", "return y"],
            [
                "y = x + 1",
                "if bool(x.mean() > 0):",
                "    y = y * 3",
                "    y = y + x",
                "else:",
                "    z = y",
                "    y = -z",
                "return y",
            ],
            ["if 0 < x.sum().item() < 9:", "    a, b = x, x * 2", "else:", "    a, b = x + 1, x", "return a * b"],
            ["y = (x * 2 if x.sum() > 0 else -x) + 1", "return y"],
            ["return torch.cat([x, x.abs() if torch.equal(x, x.abs()) else x])"],
            ["if x.any():", "    return {'a': x * 2, 'b': (x, x + 1)}", "return {'a': x + 1, 'b': (x * 0, x)}"],
        ],
        ids=["return", "views", "and-not", "assign", "assign-both", "item", "expression", "nested", "structure"],
    )
    @pytest.mark.one_case
    def test_a_branch_on_values_becomes_torch_cond(self, bench: Workbench, lines: list[str]) -> None:
        check(bench, net(*lines, init="self.f = nn.Linear(4, 4)"), ONE)

    @pytest.mark.matrix
    def test_branches_inside_branches_take_one_edit_each(self, bench: Workbench) -> None:
        lines = ["if x.sum() > 0:", "    return x * 2", "elif x.min() < -0.5:", "    return x - 1", "return x.exp()"]
        check(bench, net(*lines), ONE, times=2)

    @pytest.mark.matrix
    def test_a_number_from_a_tensor_goes_into_the_branches_as_a_tensor(self, bench: Workbench) -> None:
        lines = ["k = n.item()", "if k > 3:", "    return x * 2", "return x + k"]
        check(bench, net(*lines), [(x, torch.tensor(k)) for x, k in zip(ROWS, (2, 5, 3, 4), strict=True)])

    @pytest.mark.parametrize(
        ("lines", "advice"),
        [
            (["while x.abs().max() > 1:", "    x = x / 2", "return x"], "a fixed number of steps"),
            (
                ["while x.max() > 0:", "    iou = x[0] / x.sum()", "    x = x[x < iou]", "return x"],
                "torchvision.ops.nms",
            ),
            (["if (x > 9).any():", "    raise ValueError", "return x * 2"], "remove the check"),
            (["if x.sum() > 0:", "    self.last = x", "return x * 2"], "change nothing else"),
            (["if x.sum() > 0:", "    x[0] = 1", "return x * 2"], "change nothing else"),
        ],
    )
    def test_failures_without_a_simple_edit_get_advice(self, bench: Workbench, lines: list[str], advice: str) -> None:
        module, path = bench.load(net(*lines))
        explanation = why(module, ROWS[:1])
        assert advice in explanation.edit
        assert explanation.replacement == ""
        assert (explanation.file, explanation.source.split("\n")[0].strip()) == (str(path), lines[0])


class TestNumbers:
    @pytest.mark.parametrize(
        "lines",
        [
            ["n = int(x.abs().sum().item()) % 3 + 1", "return x[:n]"],
            ["n = int(x.abs().sum()) + int(x.sum().item() * 0)", "return torch.ones(n)"],
            ["return x * float(x.max() + 1)"],
        ],
    )
    def test_a_conversion_is_made_on_the_tensor(self, bench: Workbench, lines: list[str]) -> None:
        check(bench, net(*lines), ONE)

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        "lines",
        [
            ["k = n.item()", "y = x[:k]", "z = y[None, None]", "return F.scaled_dot_product_attention(z, z, z)"],
            ["return self.f(x[: n.max()])"],
            ["y = x[None, None, : n.item() + 1]", "return F.scaled_dot_product_attention(y, y, y)"],
        ],
        ids=["name", "expression", "sum"],
    )
    def test_a_size_from_values_gets_its_bounds(self, bench: Workbench, lines: list[str]) -> None:
        inputs = [(torch.randn(rows, 4), torch.tensor(size)) for rows, size in ((5, 3), (2, 1), (9, 8))]
        check(bench, net(*lines, init="self.f = nn.BatchNorm1d(4)"), inputs)

    def test_a_loop_over_a_number_gets_advice(self, bench: Workbench) -> None:
        module, _ = bench.load(net("for i in range(n.item()):", "    x = x + i", "return x"))
        explanation = why(module, [ROWS[0], torch.tensor(2)])
        assert explanation.cause.startswith("its code needs a tensor's value as a Python number")
        assert "--capture script, which keeps loops (over numbers as range(int(n)))" in explanation.edit
        assert explanation.source.strip() == "for i in range(n.item()):\n            x = x + i"
        assert not explanation.replacement

    @pytest.mark.matrix
    @pytest.mark.parametrize("n", ["n:int64[]=1..6", "n:int64[]"], ids=["range", "any"])
    def test_a_loop_over_a_number_keeps_all_sizes_by_capture_script(self, bench: Workbench, n: str) -> None:
        """Without a range the proof must not choose numbers of steps that never end."""
        module, _ = bench.load(net("for i in range(int(n)):", "    x = x + i", "return x"))
        archive = export_model(module, inputs=["x:float32[n,4]", n], capture="script")
        assert [spec.shape for spec in archive.signature.inputs] == [("n", 4), ()]

    @pytest.mark.matrix
    def test_a_loop_that_does_not_end_on_chosen_values_does_not_stop_the_proof(self, bench: Workbench) -> None:
        """PyTorch's maximum is NaN where one value is, which ends the loop; the graph's is infinity, which does not."""
        module, _ = bench.load(net("while x.abs().max() > n:", "    x = x / 2", "return x"))
        archive = export_model(module, inputs=["x:float32[n,4]", "n:int64[]=1..6"], capture="script")
        assert [spec.shape for spec in archive.signature.inputs] == [("n", 4), ()]
        notes = archive.variant().serving.provenance.notes
        assert any("the exported graph does not end where the model does" in note for note in notes)


class TestDimensions:
    @pytest.mark.matrix
    @pytest.mark.parametrize(
        "lines",
        [
            ["return torch.stack([row * i for i, row in enumerate(x)])"],
            ["return torch.cat([self.f(row[None]) for row in x], dim=0)"],
            ["y = x + 1", "return torch.stack([a * b for a, b in zip(x, y)]) + 1"],
            [
                "out = []",
                "for row in x:",
                "    z = row / row.norm()",
                "    out.append(self.f(z))",
                "return torch.stack(out)",
            ],
            [
                "y = x * 2",
                "out = []",
                "for i in range(len(x)):",
                "    out.append(x[i] * y[i, 1:3].sum() + i)",
                "y = y + 1",
                "y = torch.stack(out) + y",
                "return y",
            ],
        ],
        ids=["enumerate", "cat", "zip", "append", "range"],
    )
    def test_a_loop_over_the_batch_becomes_vmap(self, bench: Workbench, lines: list[str]) -> None:
        check(bench, net(*lines, init="self.f = nn.Linear(4, 4)"), ONE)

    @pytest.mark.matrix
    def test_a_loop_rewritten_to_vmap_is_exported(self, bench: Workbench) -> None:
        body = net("return torch.stack([self.f(row) / row.norm() for row in x])", init="self.f = nn.Linear(4, 4)")
        repaired = bench.repair(body, ROWS[:1])
        del repaired.captured
        for target in ("onnx", "pt2"):
            archive = export_model(repaired, inputs="x:float32[batch,4]", target=target)
            assert archive.signature.batch == "batch"
            assert not [note for note in archive.variant().serving.provenance.notes if "left out" in note]
        assert bisect_model(repaired, inputs="x:float32[batch,4]")[0] is None

    @pytest.mark.matrix
    def test_a_loop_over_the_batch_may_be_kept_by_a_fixed_size(self, bench: Workbench) -> None:
        module, _ = bench.load(net("return torch.stack([row * i for i, row in enumerate(x)])"))
        explanation = why(module, ROWS[:1])
        assert "fixes 'batch' at 3, its size during the capture" in explanation.cause
        assert explanation.edit.startswith("compute all rows at once by torch.vmap")
        assert explanation.edit.endswith("or declare a number instead of the dimension's name")
        with quiet():
            captured = torch.export.export(module, (ROWS[0],)).module()
        torch.testing.assert_close(captured(ROWS[0]), module(ROWS[0]))

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("lines", "advice"),
        [
            (
                ["h = x[0] * 0", "for row in x:", "    h = torch.tanh(h + row)", "return h"],
                "'h' is carried from step to step",
            ),
            (["h = x[0] * 0", "for row in x:", "    h += row", "return h"], "'h' is carried from step to step"),
            (["return x.reshape(3, 4)"], "replace the code that depends on the size, such as a Python loop"),
            (["out = {}", "for row in x:", "    out[len(out)] = row", "return out"], "torch.vmap"),
        ],
    )
    def test_a_loop_that_is_not_of_rows_gets_advice(self, bench: Workbench, lines: list[str], advice: str) -> None:
        explanation = why(bench.load(net(*lines))[0], ROWS[:1])
        assert advice in explanation.edit
        assert explanation.edit.count("declare") == 1
        assert explanation.replacement == ""

    @pytest.mark.matrix
    def test_a_loop_of_dependent_steps_keeps_all_sizes_by_capture_script(self, bench: Workbench) -> None:
        lines = ["h = x[0] + n", "for i in range(1, x.size(0)):", "    h = torch.tanh(h + x[i])", "return h"]
        module, _ = bench.load(net(*lines))
        explanation = why(module, [ROWS[0], torch.tensor(2.0)])
        assert "('h' is carried from step to step): export with --capture script, which keeps" in explanation.edit
        archive = export_model(module, inputs=["x:float32[n,4]", "n:float32[]"], capture="script")
        assert [spec.shape for spec in archive.signature.inputs] == [("n", 4), ()]

    def test_an_example_of_one_row_needs_a_second(self, bench: Workbench) -> None:
        module, path = bench.load(net("return x * 2"))
        x = torch.ones(1, 4)
        explanation = why(module, [x])
        assert explanation.cause == "the example has size 1 along 'batch', which torch.export treats as fixed"
        assert "torch.cat([x, x])" in explanation.edit
        assert (explanation.file, explanation.source) == (str(path), "    def forward(self, x, n=None):")
        captured: Callable[..., torch.Tensor] = capture(module, [torch.cat([x, x])]).module()
        for rows in ROWS:
            assert torch.equal(captured(rows), rows * 2)

    @pytest.mark.one_case
    @pytest.mark.parametrize(
        ("lines", "shape", "expected"),
        [
            (["return x * 2 if x.shape[0] <= 6 else x"], (3, 4), "limits its dimensions; declare them as batch=..6"),
            (["return x * 2 if x.shape[0] > 2 else x"], (3, 4), "limits its dimensions; declare them as batch=3.."),
            (["return x.reshape(-1, 2, 4) * 2"], (4, 4), "needs 'batch' to be a multiple of 2, which"),
            (["return x[: x.shape[0] // 2] if x.shape[0] < 9 else x"], (5, 4), "multiple of 2 less 1, which"),
            (["return x[: x.shape[0] // 2] if x.shape[0] < 9 else x"], (5, 4), "narrower range, such as batch=4..7"),
            (
                ["return F.conv1d(x.new_ones(1, 1, 9), x[None, None, :, 0], padding='same')"],
                (3, 4),
                "less 1, which a dynamic dimension does not guarantee; pad inside the model, or declare 'batch' as one",
            ),
        ],
    )
    def test_a_limit_is_shown_in_the_syntax_of_inputs(
        self, bench: Workbench, lines: list[str], shape: tuple[int, ...], expected: str
    ) -> None:
        assert expected in str(why(bench.load(net(*lines))[0], [torch.ones(shape)]))

    def test_equal_dimensions_need_one_name(self) -> None:
        class Add(nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return x + y

        with pytest.raises(Exception, match="Constraints violated") as caught, quiet():
            torch.export.export(
                Add(), (torch.ones(3), torch.zeros(3)), dynamic_shapes=({0: Dim("left")}, {0: Dim("right")})
            )
        text = str(explain(caught.value, Add()))
        assert "'right' and 'left' to be equal; declare them with one name" in text


class TestPlaces:
    @pytest.mark.matrix
    def test_the_line_is_the_innermost_one_of_the_user(self, bench: Workbench) -> None:
        inner = net("if x.sum() > 0:", "    return x", "return -x").replace("Net", "Inner")
        module, path = bench.load(inner + net("return self.inner(x) + 1", init="self.inner = Inner()"))
        for strict in (False, True):
            explanation = explain(failure(module, ROWS[:1], strict), module)
            assert (explanation.file, explanation.line, explanation.function) == (str(path), 8, "forward")
            assert explanation.source == "        if x.sum() > 0:\n            return x\n        return -x"

    def test_the_text_shows_everything_and_the_sentence_is_one_line(self, bench: Workbench) -> None:
        module, path = bench.load(net("if x.sum() > 0:", "    return x", "return -x"))
        explanation = why(module, ROWS[:1])
        assert explanation.text().split("\n") == [
            "its code branches on the values of a tensor (such as `if x.sum() > 0`), which a graph cannot",
            "",
            f"{path}:8 in forward",
            "    if x.sum() > 0:",
            "        return x",
            "    return -x",
            "",
            "Remedy: use torch.where or torch.cond, whose branches must return tensors of equal shape and type and "
            "change nothing else:",
            "    return torch.cond(x.sum() > 0, lambda: x.clone(), lambda: -x)",
        ]
        assert str(explanation).endswith(f"change nothing else (at {path}:8 in forward)")
        assert "\n" not in str(explanation)

    @pytest.mark.matrix
    def test_a_custom_operator_without_shapes(self, bench: Workbench) -> None:
        operator = (
            '@torch.library.custom_op("explained::twice", mutates_args=())\n'
            "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n\n\n"
        )
        body = operator + net("return twice(x)")
        module, path = bench.load(body)
        for strict in (False, True):
            explanation = explain(failure(module, ROWS[:1], strict), module)
            assert explanation.cause == "the operator explained::twice does not declare the shapes of its outputs"
            assert "@twice.register_fake" in explanation.edit
            assert (explanation.file, explanation.source.strip()) == (str(path), "return twice(x)")
        fake = "@twice.register_fake\ndef _(x):\n    return torch.empty_like(x)\n\n\n"
        repaired, _ = bench.load((operator + fake + net("return twice(x)")).replace("::twice", "::again"))
        assert torch.equal(capture(repaired, ROWS[:1]).module()(ROWS[3]), ROWS[3] * 2)

    def test_numpy_is_named(self, bench: Workbench) -> None:
        module, _ = bench.load(net("return torch.from_numpy(x.numpy() * 2)"))
        explanation = why(module, ROWS[:1])
        assert explanation.cause == "its code leaves PyTorch for numpy, which a graph cannot"
        assert explanation.source.strip() == "return torch.from_numpy(x.numpy() * 2)"

    def test_other_exporters_are_explained_too(self, bench: Workbench) -> None:
        module, path = bench.load(net("if x.sum() > 0:", "    return x", "return -x"))
        with pytest.raises(fx.proxy.TraceError) as caught:
            fx.symbolic_trace(module)
        explanation = explain(caught.value, module)
        assert (explanation.file, explanation.line) == (str(path), 8)
        assert explanation.replacement.startswith("        return torch.cond(x.sum() > 0")
        module, path = bench.load(net("return x.whatever()"))
        with pytest.raises(Exception, match="whatever") as unscriptable, quiet():
            torch.jit.script(module)
        explanation = explain(unscriptable.value, module)
        assert (explanation.file, explanation.line) == (str(path), 8)
        assert "whatever" in explanation.cause

    def test_an_error_without_a_place_in_a_module_of_pytorch(self) -> None:
        with pytest.raises(Exception, match="Constraints violated") as caught:
            capture(nn.Flatten(0), [torch.ones(1, 4)])
        explanation = explain(caught.value, nn.Flatten(0))
        assert (explanation.file, explanation.source) == ("", "")
        assert "(at" not in str(explanation)
        assert "size 1" in explanation.text()

    def test_torchscript_has_no_line_and_its_dicts_are_named(self) -> None:
        class Named(nn.Module):
            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"double": x * 2, "more": x + 1}

        with quiet():
            traced = torch.jit.trace(Named(), torch.ones(2, 4), strict=False)  # type: ignore[no-untyped-call]
        with pytest.raises(ExportError, match="its TorchScript creates a dict") as caught:
            export_model(traced, inputs="x:float32[batch,4]")
        assert "return a tuple of tensors" in str(caught.value)
        assert "graph(" not in str(caught.value)
        assert "(at" not in str(caught.value)

    def test_code_without_a_file_is_explained_too(self) -> None:
        scope: dict[str, Any] = {}
        exec("def decide(x):\n    return x if x.sum() > 0 else -x", scope)

        class Net(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return scope["decide"](x)

        explanation = why(Net(), ROWS[:1])
        assert explanation.source.strip() == 'return scope["decide"](x)'
        assert "torch.cond" in explanation.edit


@pytest.mark.matrix
def test_a_second_error_helps_only_if_it_is_of_the_same_kind(bench: Workbench) -> None:
    module, _ = bench.load(net("return torch.stack([row for row in x])"))
    first, second = (failure(module, ROWS[:1], strict) for strict in (False, True))
    assert explain(first, module, [ValueError("another matter")]).replacement == ""
    assert "torch.vmap" in explain(first, module, [second]).replacement


DEEP = """
import torch
from torch import nn


@torch.library.custom_op("deep::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Net(nn.Module):
    def forward(self, x, n):
        x = torch.stack([row + 1 for row in x])
        x = twice(x)
        if n > 3:
            return x
        return -x
"""
EASY = """
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return x * 2
"""
WAITING = """
import os
import time
from pathlib import Path

from torch import nn


class Net(nn.Module):
    def forward(self, x):
        Path("started.tmp").write_text(str(os.getpid()))
        Path("started.tmp").rename("started")
        time.sleep(600)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
class TestDeep:
    def test_all_causes_are_found_in_one_go(self, here: Path) -> None:
        (here / "deep_net.py").write_text(DEEP, encoding="utf-8")
        recipe = Recipe("deep_net:Net", ("x:float32[batch,4]", "n:int64[]"))
        operator, loop, branch = sorted(explain_deep(recipe, limit=300), key=lambda item: item.line)
        assert operator.cause == "the operator deep.twice.default does not declare the shapes of its outputs"
        assert loop.cause == "its code is valid only where batch == 3"
        assert (loop.file, loop.line) == (str(here / "deep_net.py"), 13)
        assert loop.replacement == "        x = torch.vmap(lambda row: row + 1)(x)"
        assert "x: tensor of [batch, 4]" in loop.details
        assert branch.source == "        if n > 3:\n            return x\n        return -x"
        assert branch.replacement.startswith("        return torch.cond(n > 3")
        assert "n > 3" in branch.source

    @pytest.mark.parametrize(
        ("code", "causes"),
        [
            (
                ["if x.sum() > 0:", "    x = x * 2", "return x, 'name'"],
                [
                    "the model returns 'name' as well as tensors, which a graph cannot",
                    "its code branches on the values",
                ],
            ),
            (["return x * 2, 3"], ["the model returns 3 as well as tensors, which a graph cannot"]),
        ],
    )
    def test_an_early_refusal_does_not_end_the_search(self, here: Path, code: list[str], causes: list[str]) -> None:
        (here / "refused_net.py").write_text(f"from torch import nn\n\n\n{net(*code)}", encoding="utf-8")
        found = explain_deep(Recipe("refused_net:Net", ("x:float32[batch,4]",)), limit=300)
        assert [item.cause.startswith(start) for item, start in zip(found, causes, strict=True)] == [True] * len(causes)
        if len(found) == 1:
            assert "the search covered the whole model and found no other obstacle" in found[0].text()

    def test_a_model_that_does_not_run_is_not_looked_into(self, bench: Workbench) -> None:
        _, path = bench.load(net("return x @ x"))
        with pytest.raises(ExportError, match="does not run on the example inputs"):
            draft.search(Recipe(f"{path.stem}:Net", ("x:float32[batch,4]",)))

    def test_a_search_without_a_hit_reports_it(self, here: Path) -> None:
        (here / "easy_net.py").write_text(EASY, encoding="utf-8")
        with pytest.raises(ExportError, match="the search covered the whole model"):
            explain_deep(Recipe("easy_net:Net", ("x:float32[batch,4]",)), limit=300)

    def test_the_search_ends_at_its_limit(self, here: Path) -> None:
        (here / "waiting_net.py").write_text(WAITING, encoding="utf-8")
        with pytest.raises(DeadlineExceeded, match=r"not finished after 0\.5 s, so there may be more causes"):
            explain_deep(Recipe("waiting_net:Net", ("x:float32[batch,4]",)), limit=0.5)

    def test_an_interrupt_ends_the_search(self, here: Path) -> None:
        (here / "waiting_net.py").write_text(WAITING, encoding="utf-8")
        started = here / "started"
        main = threading.get_ident()

        def interrupt() -> None:
            while not started.exists():
                time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            explain_deep(Recipe("waiting_net:Net", ("x:float32[batch,4]",)), limit=300)
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)

    def test_a_crash_is_reported(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = here / "python"
        python.write_text("#!/bin/sh\necho no luck >&2\nexit 7\n", encoding="utf-8")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(ExportError, match=r"crashed \(exit status 7\): no luck"):
            explain_deep(Recipe("any_net:Net", ("x:float32[batch,4]",)), limit=300)

    def test_a_refusal_is_reported(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (here / deep.REQUEST).write_text(json.dumps({"source": "absent_net:Net"}), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["draft", str(here)])
        draft.main()
        assert "there is no Python module 'absent_net'" in json.loads((here / deep.ANSWER).read_text())["error"]
