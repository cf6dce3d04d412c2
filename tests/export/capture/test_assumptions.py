"""Conditions that a model's code puts on its sizes: a capture of one side of them is never accepted for both."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from html import unescape

import pytest
import torch
from torch import nn
from torch.nn import functional

from ingot.errors import ExportError, ParityError
from ingot.export import export_model
from ingot.export.capture.counterexamples import Assumption, search
from ingot.export.pipeline import Capture
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Range
from tests.export.models import Function

SPEC = "x:float32[batch,seq]"


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.parametrize(
    ("condition", "shown"),
    [
        (lambda rows, columns: rows * columns % 2 == 1, "% 2"),
        (lambda rows, columns: rows * columns > 1000, "<= 1000"),
        (lambda rows, columns: rows * columns == 77, "!= 77"),
    ],
    ids=["parity", "product", "one-pair"],
)
@pytest.mark.parametrize("capture", ["auto", "inferred", "deferred", "oblivious"])
@pytest.mark.one_case
def test_a_branch_on_sizes_is_refused_with_its_condition(
    condition: Callable[[int, int], bool], shown: str, capture: Capture
) -> None:
    """The sizes that every export tries break none of these; the conditions themselves name the sizes to try."""
    module = Function(lambda x: x * 2 if condition(x.shape[0], x.shape[1]) else x)
    with pytest.raises(ParityError, match=f"the captured graph is valid only where .*{shown}"):
        export_model(module, inputs=SPEC, capture=capture)


@pytest.mark.matrix
def test_a_branch_on_a_size_of_one_is_refused_with_the_sizes_to_declare() -> None:
    """PyTorch's graphs are those of sizes from 2 on, and have no condition for that."""
    module = Function(lambda x: x if x.shape[1] == 1 else x - x.mean(1, keepdim=True))
    with pytest.raises(ParityError, match=r"a size of 1 in another way, .*: declare 'seq=2\.\.'"):
        export_model(module, inputs=SPEC)
    export_model(module, inputs="x:float32[batch,seq=2..]")


@pytest.mark.matrix
def test_a_branch_with_equal_sides_is_accepted() -> None:
    module = Function(lambda x: x + x if x.shape[0] * x.shape[1] > 1000 else x * 2)
    assert export_model(module, inputs=SPEC).signature.batch == "batch"


@pytest.mark.matrix
def test_a_branch_at_sizes_too_large_to_run_is_captured_and_compared() -> None:
    """As in diffusers, which copies a tensor of 2**31 bytes or more before it is resized."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    copied = Function(lambda x: (x.contiguous() if x.numel() * 2 > 2**31 else x) * 2)
    notes = export_model(copied, inputs=SPEC).variant().serving.provenance.notes
    (note,) = [note for note in notes if "too large to run" in note]
    assert "where not batch * seq <= 1073741824" in note
    with pytest.raises(ParityError, match="too large to test without that; declare ranges within the condition"):
        export_model(Function(lambda x: x * 3 if x.numel() * 2 > 2**31 else x * 2), inputs=SPEC)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB: no such tensor was allocated


class Truncated(nn.Module):
    """Cuts long inputs, and scales by a number that depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(40, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 40:
            x = x[:, :40]
        x = x + self.places[: x.shape[1]]
        factor = math.log(torch.sym_max(x.shape[1], 16))  # type: ignore[no-untyped-call]
        return x.reshape(x.shape[0], x.shape[1], 2, 2).sum(1) * factor


@pytest.mark.matrix
def test_the_side_of_a_condition_that_is_right_for_all_sizes_is_captured() -> None:
    module = Truncated().eval()
    archive = export_model(module, inputs="x:float32[batch,seq,4]")
    assert archive.signature.batch == "batch"
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    for size in (1, 16, 17, 39, 40, 41, 300):
        x = torch.randn(2, size, 4)
        torch.testing.assert_close(torch.from_numpy(engine.run({"x": x.numpy()})["output"]), module(x).detach())


@pytest.mark.matrix
def test_a_range_within_the_condition_is_taken() -> None:
    module = Function(lambda x: x * 2 if x.shape[0] * x.shape[1] > 1000 else x)
    archive = export_model(module, inputs="x:float32[batch=1..20,seq=1..50]")
    assert archive.signature.range("seq") == Range(1, 50)


@pytest.mark.matrix
def test_a_factor_that_torch_cannot_follow_is_captured() -> None:
    module = Function(lambda x: torch.nn.functional.interpolate(x[:, None], scale_factor=3.0))
    assert export_model(module, inputs=SPEC).signature.symbols == ("batch", "seq")


@pytest.mark.matrix
def test_a_rounded_size_is_evaluated() -> None:
    module = Function(lambda x: x[:, : round(x.shape[1] * 0.5)].sum(1))
    assert export_model(module, inputs=SPEC).signature.batch == "batch"


@pytest.mark.parametrize(
    ("spec", "condition"),
    [
        ("x:float32[a=32..512,b=32..512]", lambda a, b: a * b == 224 * 224),
        ("x:float32[a=14..,b=28..518]", lambda a, b: (a // 14) * (b // 14) == 256),
        ("x:float32[a=1..512,2]", lambda a, b: (a + 63) // 64 == 7),
        ("x:float32[a,2]", lambda a, b: a // 8 == 50),
        ("x:float32[a,2]", lambda a, b: a // 100 == 57),
        ("x:float32[a=..:16,2]", lambda a, b: a == 1600),
    ],
    ids=["area", "patches", "blocks", "eighths", "hundreds", "steps"],
)
@pytest.mark.matrix
def test_one_size_among_many_is_found(spec: str, condition: Callable[[int, int], bool]) -> None:
    module = Function(lambda x: x * 2 if condition(x.shape[0], x.shape[1]) else x)
    with pytest.raises(ExportError, match=r"graph is valid only where|was captured for .*\ba\b.* != "):
        export_model(module, inputs=spec)


@pytest.mark.matrix
def test_a_condition_that_no_tried_size_breaks_is_noted() -> None:
    module = Function(lambda x: x * 2 if (x.shape[0] * 7919 + x.shape[1] * 104_729) % 999_983 == 17 else x)
    archive = export_model(module, inputs=SPEC)
    (note,) = [note for note in archive.variant().serving.provenance.notes if "condition" in note]
    shown = "(7919 * batch + 104729 * seq) % 999983 != 17"
    assert note.startswith("1 condition on sizes held at all sizes that were tried")
    assert f": {shown}." in note
    for report in ("report.txt", "report.html", "report.json"):
        document = (archive.variant().document(report) or b"").decode()
        assert unescape(document).count(shown) == 2  # in the list, and in the note


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (lambda: UNet(), ["x:float32[batch,3,height=..:4,width=8..:4]"]),
        (lambda: Masked(), ["x:float32[batch,seq,8]", "mask:float32[batch,seq]"]),
    ],
    ids=["unet", "masked"],
)
def test_conditions_implied_by_the_ranges_are_not_noted(module: Callable[[], nn.Module], inputs: list[str]) -> None:
    archive = export_model(module(), inputs=inputs)
    assert not any("condition" in note for note in archive.variant().serving.provenance.notes)


@pytest.mark.matrix
def test_a_condition_of_code_that_is_not_in_the_rewritten_graph_is_listed() -> None:
    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x) * (2 if x.shape[2] * 7919 % 999_983 == 17 else 1)

    report = export_model(Gate(), inputs="x:float32[batch,2,seq]").variant().document("report.txt") or b""
    assert b"silu-gate" in report
    assert b"7919 * seq % 999983 != 17" in report


@pytest.mark.matrix
@pytest.mark.parametrize("capture", ["strict", "inferred"])
def test_sizes_of_one_name_are_not_noted_to_be_equal(capture: Capture) -> None:
    archive = export_model(Sum(), inputs=["x:float32[batch,seq]", "y:float32[batch,seq]"], capture=capture)
    assert not any("held at all sizes" in note for note in archive.variant().serving.provenance.notes)


class TestSearch:
    def broken(self, holds: Callable[[int, int], bool], *numbers: int, **ranges: Range) -> list[dict[str, int]]:
        assumption = Assumption("", lambda sizes: holds(sizes["a"], sizes["b"]), ("a", "b"), numbers)
        return search([assumption], {"a": 3, "b": 5}, ranges)[0]

    def test_the_smallest_sizes_are_given(self) -> None:
        assert self.broken(lambda a, b: True) == []
        assert self.broken(lambda a, b: a != 1)[0]["a"] == 1
        assert self.broken(lambda a, b: (a, b) != (7, 11)) == [{"a": 7, "b": 11}]
        assert self.broken(lambda a, b: a != b)[0] == {"a": 1, "b": 1}

    def test_only_declared_sizes_are_tried_and_all_of_few(self) -> None:
        assert self.broken(lambda a, b: a < 100, a=Range(1, 99)) == []
        assert self.broken(lambda a, b: (a, b) != (173, 91), a=Range(1, 200), b=Range(1, 200)) == [{"a": 173, "b": 91}]
        assert self.broken(lambda a, b: a % 4 == 0, a=Range(4, None, 4)) == []

    def test_an_exhaustive_or_simple_check_is_certain(self) -> None:
        def unsure(high: int | None, simple: bool) -> int:
            holding = Assumption("", lambda sizes: True, ("a",), simple=simple)
            return len(search([holding], {"a": 3}, {"a": Range(1, high)})[1])

        assert (unsure(100, False), unsure(None, False), unsure(None, True)) == (0, 1, 0)


@pytest.mark.matrix
def test_a_dimension_that_the_example_allows_at_one_size_only_is_refused() -> None:
    """Cutting or repeating the example gives inputs that the model rejects: other sizes would stay unchecked."""

    def strict(x: torch.Tensor) -> torch.Tensor:
        if not bool((x.sum(0) == 6).all()):
            raise ValueError("the columns must add up to 6")
        return x * 2

    example = torch.tensor([[1.0, 2.0], [2.0, 2.0], [3.0, 2.0]])
    with pytest.raises(ExportError):
        export_model(Function(strict), example, inputs=SPEC)


class Masked(nn.Module):
    """Reshapes a mask to a quotient of sizes, as GPT-2 does."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mask = mask.view(mask.shape[0], -1)  # (batch*seq) // batch columns
        return x.view(-1, 8).view(mask.shape[0], mask.shape[1], 8) * mask[:, :, None]


class UNet(nn.Module):
    """Halves an image twice and joins what it doubles again, so sizes must be multiples of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 3, 3, padding=1), nn.ConvTranspose2d(3, 3, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = functional.max_pool2d(self.down(x), 2)
        quarter = functional.max_pool2d(self.down(half), 2)
        return torch.cat([x, self.up(self.up(quarter) + half)], dim=1)


@pytest.mark.matrix
def test_a_step_makes_multiples_of_a_dimension() -> None:
    module = UNet().eval()
    archive = export_model(module, inputs="x:float32[batch,3,height=..64:4,width=8..:4]")
    assert archive.signature.ranges == {"height": Range(4, 64, 4), "width": Range(8, None, 4)}
    assert archive.signature.outputs[0].shape == ("batch", 6, "height", "width")
    x = torch.randn(2, 3, 40, 16)
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), module(x).detach())


@pytest.mark.matrix
def test_sizes_within_a_step_are_named_in_parts_of_it() -> None:
    archive = export_model(Function(lambda x: x.reshape(-1, 4) * 2), inputs="x:float32[n=..:8]")
    assert archive.signature.outputs[0].shape == ("n/4", 4)


@pytest.mark.matrix
def test_a_condition_that_the_steps_do_not_promise_fixes_the_dimension() -> None:
    module = Function(lambda x: x * 2 if len(x) % 8 == 0 else x)
    with pytest.raises(ExportError, match="fixes 'n' at 12, its size during the capture"):
        export_model(module, inputs="x:float32[n=..:4]")
    assert export_model(module, inputs="x:float32[n=..:8]").signature.ranges == {"n": Range(8, None, 8)}
