"""Operators without an ONNX form in PyTorch's exporter, or with calls that it refuses."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import pytest
import torch
from onnxscript import evaluator, ir
from onnxscript.values import Opset
from torch import Tensor
from torch.nn import functional
from torch.onnx._internal.exporter._building import OpRecorder

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.export.lower import onnx as lower
from ingot.export.lower.forms import missing_forms
from ingot.runtime import EngineSpec, load_engine
from tests.export.models import Function

SDPA = functional.scaled_dot_product_attention


def check(function: Callable[[Tensor], Any], inputs: str, *examples: Tensor) -> None:
    """Export a function of one tensor, and compare it with the graph in ONNX Runtime at the test's sizes."""
    archive = export_model(Function(function), inputs=inputs, rewrite="none")
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    for x in examples:
        actual = [torch.from_numpy(array) for array in engine.run({"x": x.numpy()}).values()]
        expected = function(x)
        wanted = [expected] if torch.is_tensor(expected) else list(expected)
        torch.testing.assert_close(actual, wanted, equal_nan=True)
    engine.close()


def attentions(x: Tensor) -> tuple[Tensor, ...]:
    query, key, value = x, x.flip(-1), x * 2
    some = x[..., :1] > x[..., :1].transpose(-2, -1)  # one row attends to nothing
    return (
        SDPA(query, key, value),
        SDPA(query, key, value, query @ key.transpose(-2, -1)),
        SDPA(query, key, value, some),
        SDPA(query, key, value, is_causal=True),
        SDPA(query, key, value, scale=0.3, dropout_p=0.0),
    )


@pytest.mark.parametrize("leading", [(), (3,), (3, 2), (3, 2, 2)], ids=lambda dims: f"{len(dims) + 2}-D")
@pytest.mark.matrix
def test_attention_with_queries_of_any_rank(leading: tuple[int, ...]) -> None:
    dims = ",".join(["batch", *map(str, leading[1:]), "seq", "4"] if leading else ["seq", "4"])
    more = torch.randn(*(2 for _ in leading[:1]), *leading[1:], 10, 4)
    check(attentions, f"x:float32[{dims}]", torch.randn(*leading, 6, 4), more)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.matrix
def test_attention_of_a_query_whose_scores_are_all_minus_infinity_is_zero(dtype: str) -> None:
    def model(x: Tensor) -> list[Tensor]:
        keys, mask = x.abs().clamp(0.1, 9.0), x[..., 0] > -100
        numbers = torch.zeros_like(x[:, :, 0]).masked_fill(~mask, -math.inf)
        masks = (mask[:, None], numbers[:, None])
        return [
            SDPA(x, keys, keys),
            SDPA(x, keys, keys, is_causal=True),
            SDPA(x, x.flip(-1).nan_to_num(1.0, 1.0, 1.0), keys, is_causal=True),
            *(SDPA(x, keys, keys, item) for item in masks),
        ]

    x = torch.randn(2, 6, 4, dtype=getattr(torch, dtype))
    x[0, 0, 0], x[0, 1, 0], x[1] = -math.inf, math.inf, x[1].abs()
    x[1, :, 1] = -math.inf
    unseen = torch.full_like(x[:1], -1.0)  # the first query sees -inf only; of later keys, inf and the mask make NaN
    unseen[0, 1:, 3], unseen[0, 0] = 3.0, torch.tensor([math.inf, 1, 1, -2])
    check(model, f"x:{dtype}[batch,seq,4]", x, unseen)


@pytest.mark.matrix
def test_reductions_by_index_in_half_precision() -> None:
    def model(x: Tensor) -> list[Tensor]:
        rows = (x > 0).long()
        return [x.scatter_add(0, rows, x), x.scatter_reduce(1, rows, x, "mean"), x.scatter_reduce(1, rows, x, "amax")]

    check(model, "x:float16[batch=2..,4]", torch.randn(5, 4).half())


@pytest.mark.matrix
def test_assignments_to_diagonals() -> None:
    def model(x: Tensor) -> list[Tensor]:
        whole, above, below = x.clone(), x.clone(), x.clone()
        whole.diagonal(dim1=-2, dim2=-1).fill_(-math.inf)
        above.diagonal(2, 1, 2).copy_(x[:, 0, :3])
        below.diagonal(-1, 2, 1).mul_(2)
        products = x[:, 0] @ x[:, 1].T
        products.diagonal().zero_()
        return [whole, above, below, products, torch.diagonal_scatter(x[0], x[0, 0, :2], offset=3)]

    check(model, "x:float32[batch,3,5]", torch.randn(2, 3, 5), torch.randn(1, 3, 5))


@pytest.mark.matrix
def test_causal_attention_to_more_keys_than_queries() -> None:
    check(lambda x: SDPA(x[:, 2:], x, x, is_causal=True), "x:float32[batch,seq=3..,4]", torch.randn(2, 7, 4))


@pytest.mark.matrix
def test_attention_whose_width_is_dynamic() -> None:
    check(lambda x: SDPA(x, x, x), "x:float32[batch,5,width=2..]", torch.randn(2, 5, 3), torch.randn(1, 5, 8))


def losses(x: Tensor) -> tuple[Tensor, ...]:
    """Cross entropy of classes and of shares, of a batch, of a sequence and of one sample, with each argument."""
    loss, shares, classes, weight = functional.cross_entropy, x.softmax(1), (x[:, 0] > 0).long(), torch.arange(1.0, 5)
    return (
        *(loss(x, shares, weight, reduction=kind, label_smoothing=0.2) for kind in ("none", "mean", "sum")),
        *(loss(x, classes, weight, label_smoothing=0.2, ignore_index=1, reduction=kind) for kind in ("none", "mean")),
        loss(x, classes, label_smoothing=0.1),
        loss(x.T[None], shares.T[None], weight, reduction="none"),
        loss(x.T[None], classes[None], weight, reduction="sum", label_smoothing=0.3),
        loss(x[0], shares[0], reduction="none"),
        loss(x[0], classes[0], weight),
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cumprod(x, 1),
        lambda x: torch.cumprod((x * 3).long(), 0),
        lambda x: torch.cummax(x, 1),
        lambda x: torch.cummin((x * 3).long(), 0),
        lambda x: torch.isin(x.round(), torch.tensor([0.0, 1.0])),
        lambda x: torch.isin(x.round(), x[0].round(), invert=True),
        lambda x: torch.searchsorted(torch.sort(x, 1).values, x),
        lambda x: torch.searchsorted(torch.tensor([-1.0, 0, 0, 2]), x.round(), right=True, out_int32=True),
        lambda x: torch.searchsorted(x[0].sort().values, 0.3),
        lambda x: torch.bucketize(0.3, x[0].sort().values, out_int32=True),
        lambda x: torch.stack(
            [torch.searchsorted((x[0] * 3).long().sort().values, bound) for bound in (0.3, -0.3, 1, -1.0)]
        ),
        lambda x: (torch.bucketize(x, x[:, 0].sort().values), torch.bucketize(x[0, 0], x[0].sort().values, right=True)),
        lambda x: torch.bucketize(x.where(x > 0, math.nan), torch.tensor([-1.0, 0, 2])),
        lambda x: (*torch.cummax(x > 0, 1), *torch.cummin(x > 0, 0)),
        lambda x: (torch.isclose(x > 0, x > 1), torch.isclose(x.long() * 100000, x.long() * 100001)),
        lambda x: torch.stack([x.amax(), x.amin(), x[0, 0].amax(), *x.aminmax()]),
        lambda x: torch.cdist(x, x * 2),
        lambda x: torch.cdist(x[None], x[None] + 1, p=3.0),
        lambda x: torch.cdist(x.round(), x, p=0.0),
        lambda x: torch.cdist(x, x + x.flip(-1), p=float("inf")),
        lambda x: torch.median(x, 1),
        lambda x: torch.median(x, 0, keepdim=True),
        torch.median,
        lambda x: torch.kthvalue(x, 2, dim=1),
        lambda x: torch.masked_select(x, x[:, :1] > 0),
        lambda x: torch.sort(x.round(), dim=0, stable=True),
        lambda x: torch.argsort(x.round(), dim=1, descending=True, stable=True),
        lambda x: torch.sort(x > 0, dim=1, descending=True, stable=True),
        lambda x: (x.take(torch.tensor(-2)), x.take(x.round().long() % 4)),
        lambda x: torch.linalg.inv(x.T @ x + torch.eye(4)),
        lambda x: torch.inverse(x[:, :, None] * torch.eye(4) + torch.eye(4) * 9),
        lambda x: torch.linalg.solve(x.T @ x + torch.eye(4), x[0]),
        lambda x: torch.linalg.solve(x.T @ x + torch.eye(4), x, left=False),
        lambda x: x.scatter(1, torch.zeros_like(x[:, :1], dtype=torch.long), x + 1),
        lambda x: x.scatter(0, (x[1:] > 0).long(), x, reduce="add"),
        lambda x: (x * 9).long().scatter_reduce(0, (x[1:] > 0).long(), (x * 9).long(), "mean"),
        lambda x: (x * 9).int().index_reduce(1, torch.tensor([3, 0, 3]), x[:, 1:].int(), "mean", include_self=False),
        lambda x: x.scatter(0, (x[1:] > 0).long(), 1.5, reduce="multiply"),
        lambda x: x.scatter_add(1, torch.zeros_like(x[:, :2], dtype=torch.long), x),
        lambda x: x.scatter_reduce(0, (x[1:] > 0).long(), x, "mean"),
        lambda x: x.scatter_reduce(0, (x[:, 1:] > 0).long(), x, "mean", include_self=False),
        lambda x: x.scatter_reduce(0, (x[1:] > 0).long(), x, "amax", include_self=False),
        lambda x: x.log().scatter_reduce(0, (x > 0).long(), x.flip(1).log(), "amax"),
        lambda x: (x - math.inf).scatter_reduce(0, (x > 0).long(), x - math.inf, "amax", include_self=False),
        lambda x: x[0, 0].scatter_reduce(0, x[0, 0].long() * 0, x[1, 1], "mean"),
        lambda x: x[:, None].squeeze((0, 1)).squeeze(0),
        lambda x: x.put(torch.tensor([1, -1, 1]), x[1, :3], accumulate=True),
        lambda x: x.index_put((x > 0,), torch.tensor(0.5)),
        lambda x: x.index_put((x[:, 0] > 0,), torch.ones(1)),
        lambda x: x.index_put((x > 0,), x[x > 0] * 2),
        lambda x: x.index_put((x > 0,), torch.tensor(0.5), accumulate=True),
        lambda x: x.index_reduce(1, torch.tensor([3, 0, 3]), x[:, 1:], "mean", include_self=False),
        lambda x: x.index_reduce(0, torch.zeros_like(x[:, 0], dtype=torch.long), x, "prod"),
        torch.fft.fftshift,
        lambda x: torch.fft.ifftshift(torch.fft.fft(x), dim=(0, -1)).real,
        lambda x: torch.roll(x, (5, -(x.shape[0] // 2)), (1, 0)),
        losses,
    ],
    ids=[
        *("cumprod", "cumprod-integers", "cummax", "cummin", "isin", "isin-not"),
        *("searchsorted", "searchsorted-right", "searchsorted-number"),
        *(
            "bucketize-number",
            "searchsorted-integers",
            "bucketize",
            "bucketize-nan",
            "cummax-flags",
            "isclose-integers",
            "extremes-of-all",
        ),
        *("cdist", "cdist-3", "cdist-0", "cdist-inf"),
        *("median-along", "median-keep", "median", "kthvalue", "masked-select", "stable-sort", "stable-argsort"),
        *("sort-flags", "take"),
        *("inverse", "inverses", "solve", "solve-right"),
        *(
            "scatter",
            "scatter-and-add",
            "scatter-mean-integers",
            "index-mean-integers",
            "scatter-and-multiply",
            "scatter-add",
            "scatter-mean",
            "scatter-mean-others",
            "scatter-most",
        ),
        *("scatter-nan", "scatter-least", "scatter-number", "squeeze", "put"),
        *("mask-put", "mask-put-rows", "mask-put-several", "mask-put-add"),
        *("index-mean", "index-product"),
        *("fftshift", "ifftshift-complex", "roll", "cross-entropy"),
    ],
)
@pytest.mark.one_case
def test_operators_that_the_exporter_lacks(function: Callable[[Tensor], Any]) -> None:
    check(function, "x:float32[n=2..,4]", torch.randn(5, 4), torch.randn(2, 4))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float32", [-math.inf, -math.inf, 1, -math.inf]),
        ("float32", [math.inf, math.inf, -1, math.inf]),
        ("float32", [1, math.nan, 3, math.nan, math.inf]),
        ("int64", [-(1 << 63), -(1 << 63), 0, -(1 << 63)]),
        ("int32", [(1 << 31) - 1, (1 << 31) - 1, 0, 0]),
        ("uint8", [0, 0, 3, 0, 3]),
        ("uint8", [255, 255, 3, 0, 0]),
    ],
    ids=["least", "most", "nan", "integer-least", "integer-most", "byte-least", "byte-most"],
)
@pytest.mark.matrix
def test_cumulative_extremes_of_rows_that_hold_the_ends_of_the_datatype(dtype: str, values: list[float]) -> None:
    x = torch.tensor([values], dtype=getattr(torch, dtype))
    check(lambda x: (*torch.cummax(x, 1), *torch.cummin(x, 1)), f"x:{dtype}[batch,n]", x, x.flip(1))


@pytest.mark.matrix
@pytest.mark.one_case
def test_places_in_sequences_that_end_in_nan() -> None:
    """PyTorch's answers depend on which values its binary search reads."""

    def places(x: Tensor) -> tuple[Tensor, ...]:
        edges, values = x[0].sort().values, torch.cat([x[1], x[1] + 0.5])
        fixed = torch.tensor([0.0, 1, math.nan, math.nan])
        found = [torch.bucketize(values, some, right=right) for some in (edges, fixed) for right in (False, True)]
        return *found, torch.searchsorted(x.sort(1).values, x), torch.searchsorted(x, x, sorter=x.argsort(1))

    rows = torch.stack([torch.arange(9.0), torch.arange(-1.0, 8)])
    rows[1, -1] = math.nan
    examples = []
    for size in (2, 5, 8, 9):
        for unknown in range(size + 1):
            x = rows[:, 9 - size :] - (9 - size)
            x[0, size - unknown :] = math.nan
            examples.append(x)
    check(places, "x:float32[2,n=2..]", *examples)


class GhostNorm(torch.nn.Module):
    """Normalizes a batch in parts whose count depends on its size, as TabNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x.chunk(math.ceil(x.shape[0] / 128), 0)], 0)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.one_case
def test_shifts_by_any_number_of_bits(dtype: torch.dtype) -> None:
    def shifts(x: Tensor) -> tuple[Tensor, ...]:
        values, steps = x.unbind(1)
        narrow = steps.to(torch.int16)
        shifted = values >> steps, values << steps, 100 >> steps, 1 << steps, values >> 70, values << 3
        return *shifted, torch.bitwise_right_shift(values, narrow), values << narrow[0].long()

    limits = torch.iinfo(dtype)
    numbers = torch.tensor([limits.min, limits.min + 1, limits.max // 3, 0, 5, limits.max], dtype=dtype)
    steps = torch.tensor([0, 1, 2, 7, 8, 31, 32, 63, 64, 100, *([] if dtype is torch.uint8 else [-1, -5])], dtype=dtype)
    check(shifts, f"x:{str(dtype).removeprefix('torch.')}[n,2]", torch.cartesian_prod(numbers, steps))


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operator that torchvision defines, whose schema and name are all that the exporter reads of it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "torchvision" or find(name, *more))
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", lambda boxes, scores, _: scores.argsort(descending=True), "CPU")  # for boxes that lie apart
    fake = torch.library.register_fake("torchvision::nms", lib=library)
    fake(lambda boxes, *_: boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64))
    lower._known.cache_clear()
    yield
    library._destroy()
    lower._known.cache_clear()


@pytest.mark.matrix
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="defines the operator itself")
@pytest.mark.usefixtures("torchvision")
def test_torchvisions_suppression_becomes_the_graphs() -> None:
    def detect(x: Tensor) -> Tensor:
        corner = torch.arange(len(x))[:, None].expand(-1, 2) * 2.0
        return x[torch.ops.torchvision.nms(torch.cat([corner, corner + 1], 1), x, 0.5)]

    archive = export_model(Function(detect), inputs="x:float32[n]")
    graph = onnx.load(archive.variants[0].path())
    assert "NonMaxSuppression" in {node.op_type for node in graph.graph.node}


@pytest.mark.matrix
def test_parts_whose_number_depends_on_a_size_are_joined() -> None:
    archive = export_model(GhostNorm().eval(), inputs="x:float32[batch,4]")
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    x = torch.randn(7, 4)
    torch.testing.assert_close(torch.from_numpy(engine.run({"x": x.numpy()})["output"]), GhostNorm().eval()(x))
    engine.close()


@pytest.mark.matrix
def test_a_loss_that_pytorch_decomposes_to_another_function_is_refused() -> None:
    def loss(x: Tensor) -> Tensor:
        return functional.multilabel_margin_loss(x, x.argsort(1))

    with pytest.raises(ExportError, match=r"multilabel_margin_loss.* compute the loss outside the model"):
        export_model(Function(loss), inputs="x:float32[batch,5]")


@pytest.mark.matrix
def test_the_index_of_a_singular_matrix_is_refused() -> None:
    with pytest.raises(ExportError, match="which matrix is singular has no ONNX form; return the inverse only"):
        export_model(Function(lambda x: torch.linalg.inv_ex(x)[1]), inputs="x:float32[4,4]")


def test_a_squeeze_of_unknown_rank_is_not_left_out() -> None:
    recorder: Any = OpRecorder
    with evaluator.default_as(recorder(Opset("", 18), {})):
        found = missing_forms.squeeze(ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT)), 0)
    assert found.producer().op_type == "Squeeze"


def test_a_value_at_the_places_of_a_mask_keeps_samples_apart() -> None:
    def clear(x: Tensor) -> Tensor:
        x = x * 1
        x[x < 0] = 0
        return x

    archive = export_model(Function(clear), inputs="x:float32[batch,4]")
    assert archive.variant().serving.signature.batch == "batch"
