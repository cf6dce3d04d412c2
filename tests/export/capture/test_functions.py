"""Functions that PyTorch captures at one size only are captured for any size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch import cov as covariance
from torch.nn import functional

from ingot.export import export_model
from ingot.export.capture import functions
from ingot.runtime import EngineSpec, load_engine

IMAGE = "x:float32[batch,3,height,width]"
VOLUME = "x:float32[batch,2,depth,height,width]"


def equal(module: nn.Module, inputs: Sequence[str], *shapes: Sequence[int]) -> None:
    """Export a module and run it at sizes that it was not captured at."""
    archive = export_model(module, inputs=inputs)
    tensors = [torch.randn(*shape) for shape in shapes]
    names = [spec.name for spec in archive.signature.inputs]
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run(feed).values()
    torch.testing.assert_close(torch.from_numpy(actual), module(*tensors), atol=1e-5, rtol=1e-4)


def test_a_device_applies_to_all_functions_after_a_capture() -> None:
    torch.utils._device._device_constructors.cache_clear()  # as in a process that has used none
    with functions.dynamic(nn.Linear(1, 1)), torch.device("meta"):
        torch.linspace(0, 1, 2)
    with torch.device("meta"):
        assert torch.linspace(0, 1, 2).is_meta


@pytest.mark.parametrize("kind", ["Avg", "Max"])
@pytest.mark.parametrize("wanted", [4, (3, None), (1, 5)], ids=str)
@pytest.mark.matrix
def test_adaptive_pooling_of_images_of_any_size(kind: str, wanted: int | tuple[int | None, int | None]) -> None:
    layer = getattr(nn, f"Adaptive{kind}Pool2d")(wanted)
    for height, width in ((9, 4), (1, 40)):
        equal(layer, [IMAGE], (2, 3, height, width))


@pytest.mark.matrix
def test_adaptive_pooling_of_lines_and_volumes() -> None:
    equal(nn.AdaptiveAvgPool1d(3), ["x:float32[batch,2,length]"], (2, 2, 17))
    equal(nn.AdaptiveMaxPool1d(3), ["x:float32[batch,2,length]"], (2, 2, 2))
    equal(nn.AdaptiveAvgPool3d((2, 1, 3)), [VOLUME], (1, 2, 9, 8, 4))


@pytest.mark.matrix
def test_pooling_of_a_fixed_size() -> None:
    equal(nn.AdaptiveMaxPool2d(3), ["x:float32[batch,3,8,9]"], (4, 3, 8, 9))
    equal(nn.AdaptiveAvgPool3d((2, 1, 3)), ["x:float32[batch,2,5,4,7]"], (3, 2, 5, 4, 7))


class Whole(nn.Module):
    """The sentence classifier of many notebooks, and global pooling of images by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(3, 4, width) for width in (2, 3))

    def forward(self, x: Tensor) -> Tensor:
        found = [layer(x) for layer in self.layers]
        pooled = [functional.max_pool1d(y, y.shape[2]).squeeze(2) for y in found]
        pooled.append(functional.avg_pool1d(found[0], x.size(2) - 1).squeeze(2))
        image = found[0].unsqueeze(2)
        pooled.append(functional.avg_pool2d(image, image.size()[2:], stride=1).flatten(1))
        pooled.append(functional.max_pool2d(image, (1, image.size(3))).flatten(1))
        return torch.cat(pooled, 1)


@pytest.mark.matrix
def test_pooling_of_a_whole_input_of_any_size() -> None:
    equal(Whole(), ["x:float32[batch,3,seq=3..]"], (2, 3, 17))


class Causal(nn.Module):
    """An encoder of transformers with a mask that it computes, whose values its layers branch on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        result: Tensor = self.encoder(x, mask=mask)
        return result


@pytest.mark.matrix
def test_an_encoder_with_a_causal_mask() -> None:
    equal(Causal().eval(), ["x:float32[1,seq,4]"], (1, 7, 4))


class Related(nn.Module):
    """Distances and correlations of rows, without those of a row with itself."""

    def forward(self, x: Tensor) -> Tensor:
        products = x @ x.T
        products.fill_diagonal_(0.5)
        functions = (torch.cov(x), torch.cov(x, correction=0), torch.corrcoef(x))
        return torch.stack((products, *functions, x.cov(), x.corrcoef() * x[0].cov() + x[0].corrcoef()))


@pytest.mark.matrix
def test_diagonals_and_covariances() -> None:
    equal(Related(), ["x:float32[n,size=2..]"], (6, 17))
    assert {"fill_diagonal_", "cov", "corrcoef"}.isdisjoint(vars(Tensor))


class Sized(nn.Module):
    """Functions whose parts, order or dimension PyTorch chooses by a size; one of them is imported by its name."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.sum(0) for part in (*torch.tensor_split(x, 3), x.T.tensor_split(2, -1)[0])]
        taken = torch.take_along_dim(x, x.argsort(0)[:, :1] - 5, 0)  # indices wrap
        products = torch.cross(x, x.flip(0)), torch.kron(x, x[:2]), torch.linalg.multi_dot([x, x.T, x])
        pairs = torch.combinations(x[:, 0]), torch.combinations(x[:, 1], 3, with_replacement=True)
        return torch.cat([part.flatten() for part in (*parts, taken, *products, *pairs, covariance(x))])


@pytest.mark.matrix
def test_functions_that_choose_by_a_size() -> None:
    archive = export_model(Sized(), inputs=["x:float32[n=2..,3]"])
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    for size in (2, 3, 4, 7):
        x = torch.randn(size, 3)
        (actual,) = engine.run({"x": x.numpy()}).values()
        torch.testing.assert_close(torch.from_numpy(actual), Sized()(x), atol=1e-5, rtol=1e-4)
    assert covariance is torch.cov


class Spelled(nn.Module):
    """The functions with the arguments in all the ways that PyTorch accepts, of fixed and of dynamic dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for dim in (1, 0):
            named = torch.tensor_split(x, sections=2, dim=dim), torch.tensor_split(input=x, sections=2, dim=dim)
            methods = x.tensor_split(2, dim), x.tensor_split(sections=2, dim=dim), x.tensor_split(indices=[1], dim=dim)
            parts += [part.sum(0) for found in (*named, *methods, torch.tensor_split(x, 2, dim)) for part in found]
        order = x.argsort(0)[:, :1]
        for y in (x, x[:2]):
            other = y.flip(1)
            parts += [torch.cross(input=y, other=other), y.cross(other, 1), y.cross(other=other, dim=1)]
            parts += [torch.kron(input=y, other=other), y.kron(other), torch.linalg.multi_dot(tensors=[y, y.T, other])]
            parts += [torch.cov(input=y, correction=0), y.cov(correction=0), torch.corrcoef(input=y)]
        parts += [torch.take_along_dim(input=x, indices=order, dim=0), x.take_along_dim(indices=order, dim=0)]
        parts += [torch.take_along_dim(x, order.flatten()), x.take_along_dim(order, 0)]
        image = x[None, None]
        parts += [functional.max_pool2d(input=image, kernel_size=(1, 3)), functional.avg_pool1d(x, kernel_size=[3])]
        parts += [functional.max_pool2d(input=image, kernel_size=image.shape[2:], stride=None)]
        parts += [functional.adaptive_avg_pool2d(input=image, output_size=(2, None))]
        return torch.cat([part.flatten() for part in parts])


@pytest.mark.matrix
def test_functions_with_named_arguments() -> None:
    equal(Spelled(), ["x:float32[n=2..,3]"], (5, 3))


class Direct(nn.Module):
    """The functions that ``torch`` itself has."""

    def forward(self, x: Tensor) -> Tensor:
        theta = x[:, :2, :3]
        grid = torch.affine_grid_generator(theta, list(x[:, None].shape), False)
        parts = (grid, torch.adaptive_avg_pool1d(x, 3), x * torch.logspace(0, 2, x.shape[2], 2))
        return torch.cat([part.flatten(1) for part in parts], 1)


@pytest.mark.matrix
def test_functions_of_torch_itself() -> None:
    equal(Direct(), ["x:float32[batch,height=2..,width=3..]"], (2, 7, 8))


class Grid(nn.Module):
    def __init__(self, corners: bool) -> None:
        super().__init__()
        self.corners = corners

    def forward(self, x: Tensor, theta: Tensor) -> Tensor:
        return functional.affine_grid(theta, list(x.shape), align_corners=self.corners)


@pytest.mark.filterwarnings("ignore:Since version")
@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.matrix
def test_affine_grids(corners: bool) -> None:
    for height, width in ((9, 4), (1, 6)):
        equal(Grid(corners), [IMAGE, "theta:float32[batch,2,3]"], (2, 3, height, width), (2, 2, 3))
    equal(Grid(corners), [VOLUME, "theta:float32[batch,3,4]"], (2, 2, 3, 8, 5), (2, 3, 4))
