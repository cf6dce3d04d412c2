"""Models split between engines: which engine runs each part, and whether outputs match the original's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

from ingot.errors import ExportError, InvalidArchive, InvalidArgument, Unsupported
from ingot.export.lower import aoti, partition
from ingot.model_store import BlobFolder, Store, add_variant
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import PartitionPlan
from ingot.runtime import Metrics, Settings
from ingot.serving import Repository
from tests.export.programs import Lowered, archive, capture
from tests.model_store import forgeries


class Net(nn.Module):
    """Convolutions, an operator that ONNX lacks, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.after = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = self.before(image)
        gram = pixels.flatten(2) @ pixels.flatten(2).mT + torch.eye(4)  # [B, 4, 4]
        logits = self.after(torch.linalg.inv(gram).reshape(image.shape[0], -1))
        return {"logits": logits, "pixels": pixels, "same": image}


class Attention(nn.Module):
    """Attention with a learned bias, which PyTorch decomposes to a layout that the captured views do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.bias = nn.Linear(6, 12), nn.Embedding(2, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.heads(x).view(rows, length, 3, 2, 2).permute(2, 0, 3, 1, 4)  # [B, H, T, D]
        bias = self.bias.weight[None, :, :, None] + mask[:, None, None, :]
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return torch.special.i0(seen.transpose(1, 2).view(rows, length, 4))  # type: ignore[no-any-return]


class Rows(nn.Module):
    """Two linear layers over rows of 6 values, and between them a function that the test supplies."""

    def __init__(self, middle: Callable[[Rows, torch.Tensor], Any]):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([2.0]))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> Any:
        return self.middle(self, x)


def _several(model: Rows, x: torch.Tensor) -> Any:
    """An operator with several outputs, a derived size, a tensor changed in place, and a weight as an output."""
    hidden = model.first(x)
    left, right = torch.split(hidden, 3, dim=1)
    q, r = torch.linalg.qr(left[:, :, None] @ right[:, None, :] + torch.eye(3))
    hidden.add_(1)
    return model.last(hidden) + torch.arange(x.shape[0])[:, None], (q @ r).reshape(x.shape[0] * 3, 3), model.scale


def _found(model: Rows, x: torch.Tensor) -> Any:
    """A data-dependent number of rows, on both sides of the operator."""
    hidden = model.first(x)
    kept = hidden[hidden[:, 0] > 0]
    return model.last(torch.special.i0(kept)), model.last(kept).tanh()


def _chosen(model: Rows, x: torch.Tensor) -> Any:
    """The operator inside a branch."""
    return model.last(torch.cond(x.sum() > 0, lambda t: torch.special.i0(t), lambda t: t - 1, (model.first(x),)))


def _complex(model: Rows, x: torch.Tensor) -> Any:
    """Complex numbers, which cannot be passed between engines."""
    hidden = model.first(x)
    return model.last(torch.linalg.eigvals(hidden[:, :, None] * hidden[:, None, :]).abs().amax(1, keepdim=True) + x)


def lowered(module: nn.Module, *inputs: str) -> Lowered:
    case, blobs = capture(module, *inputs), BlobFolder.scratch()
    return Lowered(case, partition.pack(case.program, blobs), blobs)


def plan(made: Lowered) -> PartitionPlan:
    return PartitionPlan.model_validate_json(made.blobs.path(made.packed.graph).read_bytes())


@pytest.fixture(scope="module")
def net() -> Lowered:
    torch.manual_seed(0)
    return lowered(Net(), "image:float32[batch,1,side,5]")


class TestOneModelInParts:
    @pytest.mark.matrix
    def test_the_operator_that_onnx_lacks_runs_in_pytorch_and_the_rest_in_onnx_runtime(self, net: Lowered) -> None:
        assert [segment.format for segment in plan(net).segments] == ["onnx", "pt2", "onnx"]
        assert net.packed.notes[1] == "part 2 of 3 is run by PyTorch (because of aten.linalg_inv)"
        assert (net.packed.format, net.packed.requires["engine"]) == ("partitioned", "onnxruntime, torch")

    @pytest.mark.matrix
    def test_its_outputs_match_the_models_at_several_sizes(self, net: Lowered) -> None:
        assert net.errors().keys() == {"logits", "pixels", "same"}

    @pytest.mark.matrix
    def test_it_is_served_in_batches_where_code_is_allowed(self, net: Lowered, tmp_path: Path) -> None:
        store, metrics = Store(tmp_path), Metrics()
        store.push(archive(net), "net:1")
        model = Repository(store, Settings(device="cpu")).add("net:1")
        with pytest.raises(Unsupported, match="format 'partitioned' can run its author's code"):
            model.load()
        model = Repository(store, Settings(device="cpu", allow_code=True), metrics).add("net:1")
        model.load()
        images = np.random.default_rng(0).standard_normal((6, 1, 4, 5)).astype(np.float32)

        async def ask() -> list[Any]:
            return await asyncio.gather(*(model.infer({"image": images[row : row + 1]}) for row in range(6)))

        answers = asyncio.run(ask())
        model.close()
        calls = metrics.registry.get_sample_value("ingot_engine_seconds_count", {"model": "net", "version": "1"})
        assert calls is not None
        assert calls < len(images)  # how many share a batch depends on the engine's measured times
        expected = net.case.eager.run({"image": images})
        for row, answer in enumerate(answers):
            assert np.allclose(answer["logits"], expected["logits"][row : row + 1], atol=1e-4)

    @pytest.mark.matrix
    def test_a_part_cannot_read_weights_of_another_model_in_the_store(self, net: Lowered, tmp_path: Path) -> None:
        made = archive(net)
        variant = made.variant()
        first = plan(net).segments[0].blob
        others = [layer for layer in net.packed.weights if layer.hex != first]
        stray = net.blobs.put(forgeries.adding(forgeries.external("0" * 64)), manifest.WEIGHT)
        swapped = plan(net).model_copy(
            update={"segments": (plan(net).segments[0].model_copy(update={"blob": stray.hex}), *plan(net).segments[1:])}
        )
        graph = net.blobs.put(manifest.encode(swapped), manifest.WEIGHT)
        for weights, name in ((others, stray.hex), ([*others, stray], "0" * 64)):
            with pytest.raises(InvalidArchive, match=f"refers to a blob that is not its own: {name}"):
                add_variant(net.blobs, variant.serving, graph, weights, [])
            with pytest.raises(InvalidArchive, match=f"refers to a blob that is not its own: {name}"):
                Store(tmp_path).push(forgeries.forged(net.blobs, variant.serving, graph, weights), "stray:1")


@pytest.mark.parametrize("middle", [_several, _found, _chosen, _complex])
@pytest.mark.matrix
def test_values_pass_between_parts(middle: Callable[[Rows, torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    made = lowered(Rows(middle), "x:float32[batch,6]")
    formats = [segment.format for segment in plan(made).segments]
    assert "onnx" in formats
    assert "pt2" in formats
    assert made.errors()


@pytest.mark.matrix
def test_views_that_decomposition_breaks_are_repaired() -> None:
    made = lowered(Attention(), "x:float32[batch,length,6]", "mask:float32[batch,length]")
    assert [segment.format for segment in plan(made).segments] == ["onnx", "pt2"]
    assert made.errors()


class TestNothingToSplit:
    @pytest.mark.matrix
    def test_a_model_that_onnx_expresses_stays_an_onnx_model(self) -> None:
        made = lowered(nn.Linear(4, 3), "input:float32[batch,4]")
        assert made.packed.format == "onnx"
        assert made.packed.notes == ("the model is not split: ONNX Runtime runs all of it",)
        assert made.errors()

    @pytest.mark.matrix
    def test_a_model_that_only_pytorch_can_run_stays_whole(self) -> None:
        made = lowered(Rows(lambda _, x: torch.special.i0(x + 1)), "x:float32[batch,6]")
        assert made.packed.format == "pt2"
        assert made.packed.notes == ("the model is not split: PyTorch (because of aten.special_i0) runs all of it",)
        assert made.errors()

    @pytest.mark.matrix
    def test_parts_that_onnx_runtime_cannot_load_run_in_pytorch(self) -> None:
        forward = Rows(lambda model, x: nn.functional.instance_norm(model.first(x).double()[:, None]))
        made = lowered(forward, "x:float32[batch,6]")
        assert made.packed.format == "pt2"
        pattern = r"the model is not split: PyTorch \(.*InstanceNormalization.*\) runs all of it"
        assert re.match(pattern, made.packed.notes[0])
        assert made.errors()


class TestCompilationErrors:
    def test_a_missing_compiler_is_reported_with_what_to_install(self, tmp_path: Path) -> None:
        program = capture(nn.Linear(4, 3), "input:float32[batch,4]").program
        no_compiler = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
        with no_compiler, pytest.raises(ExportError, match=r"install g\+\+"):
            aoti.lower(program, tmp_path / "model.pt2")

    def test_a_missing_device_is_reported(self, tmp_path: Path) -> None:
        program = capture(nn.Linear(4, 3), "input:float32[batch,4]").program
        for device in ("tpu",) if torch.cuda.is_available() else ("tpu", "cuda"):
            with pytest.raises(InvalidArgument, match=f"cannot be compiled for '{device}' here"):
                aoti.lower(program, tmp_path / "model.pt2", device=device)

    @pytest.mark.matrix
    def test_a_custom_operator_without_a_graph_is_named(self, tmp_path: Path) -> None:
        @torch.library.custom_op("ingot_tests::reversed", mutates_args=())
        def reverse(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(x.numpy()[::-1].copy())

        reverse.register_fake(torch.empty_like)
        program = capture(Rows(lambda _, x: reverse(x)), "x:float32[batch,6]").program
        with pytest.raises(ExportError, match="the operator ingot_tests::reversed cannot be compiled"):
            aoti.lower(program, tmp_path / "model.pt2")
