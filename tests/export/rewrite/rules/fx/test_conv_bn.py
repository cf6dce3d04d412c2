from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ingot.export.program import quiet
from ingot.export.rewrite.rules.fx.conv_bn import ConvBn
from tests.export.rewrite.rules.fx.support import lower, onnx_operators, operators, rewrite, trace

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

IMAGE = "x:float32[batch,3,8,8]"


def trained(module: nn.Module) -> nn.Module:
    """Set statistics of batch norms that are not the identity."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            for parameter in (layer.running_mean, layer.weight, layer.bias):
                if parameter is not None:
                    nn.init.normal_(parameter)
            if layer.running_var is not None:
                nn.init.uniform_(layer.running_var, 0.2, 3)
    return module


class Block(nn.Module):
    """As in a ResNet: in-place activations and a projected shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, padding="same", groups=3), nn.BatchNorm2d(6, affine=False))
        self.shortcut = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x))
        y += self.shortcut(x)
        return y.relu_()  # type: ignore[no-any-return]


def test_the_norms_of_a_residual_block_go_into_its_convolutions_and_lower_to_onnx() -> None:
    model = lower(ConvBn(), trained(Block()), IMAGE, matches=3)
    assert onnx_operators(model) == {"Conv": 3, "Relu": 2, "Add": 1}


def test_the_module_keeps_its_weights_and_the_graph_loses_the_old_ones() -> None:
    module = trained(Block())
    before = copy.deepcopy(module.state_dict())
    graph = rewrite(ConvBn(), module, IMAGE, matches=3)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert len(graph.state_dict()) == 6
    (first, *_) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default)
    assert "BatchNorm2d" in str(first.meta["nn_module_stack"])


@pytest.mark.parametrize(
    ("module", "given"),
    [
        (nn.Sequential(nn.Conv1d(4, 6, 3, stride=2), nn.BatchNorm1d(6)), "x:float32[batch,4,9]"),
        (nn.Sequential(nn.Conv3d(2, 4, 2, dilation=2), nn.BatchNorm3d(4)), "x:float32[batch,2,5,5,5]"),
        (nn.Sequential(nn.ConvTranspose2d(3, 5, 3, stride=2), nn.BatchNorm2d(5)), "x:float32[batch,3,4,4]"),
        (nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)), "x:float32[batch,4]"),
    ],
    ids=["conv1d", "conv3d", "transposed", "linear"],
)
def test_every_kind_of_layer_folds(module: nn.Module, given: str) -> None:
    graph = rewrite(ConvBn(), trained(module), given, matches=1)
    assert sum(operators(graph).values()) == 1


def test_layers_in_half_precision_are_folded_exactly_and_rounded_once() -> None:
    linear, norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
    module = trained(nn.Sequential(linear, norm)).half().eval()
    graph = ConvBn()(trace(module, torch.randn(2, 4).half())).graph
    assert norm.running_var is not None
    scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
    (weight,) = [value for value in graph.state_dict().values() if value.dim() == 2]
    assert torch.equal(weight, (linear.weight.double() * scale[:, None]).half())


def test_a_decomposed_program_folds_too() -> None:
    module = trained(Block()).eval()
    x = torch.randn(2, 3, 8, 8)
    with quiet(), torch.no_grad():
        graph = torch.export.export(module, (x,)).run_decompositions().module()
        result = ConvBn()(graph)
        assert "aten._native_batch_norm_legit_no_training.default" in operators(graph)
        assert result.matches == 3
        torch.testing.assert_close(result.graph(x), module(x), rtol=1e-5, atol=1e-5)


class Twice(nn.Module):
    """The convolution's result has a second use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + self.norm(y)  # type: ignore[no-any-return]


class Between(Twice):
    """Another operator is between the two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x).relu())  # type: ignore[no-any-return]


class Computed(Twice):
    """The weight is computed from the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.conv.weight * x.mean()
        return self.norm(nn.functional.conv2d(x, weight))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "given"),
    [
        (Twice(), IMAGE),
        (Between(), IMAGE),
        (Computed(), IMAGE),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)), "x:float32[2,3,8,8]"),
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)), "x:float32[batch,5,4]"),
        (nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)), "x:float32[batch,4,4,4]"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)), IMAGE),
    ],
    ids=["used twice", "not adjacent", "computed", "no statistics", "not the channels", "groups", "other order"],
)
def test_norms_that_cannot_be_folded_stay(module: nn.Module, given: str) -> None:
    rewrite(ConvBn(), trained(module), given, matches=0)


def test_statistics_that_the_graph_updates_are_not_folded() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.5))

    class Adapting(nn.Module):
        """Normalizes by its own statistics, then updates them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            self.inner[1].running_mean.mul_(0.5).add_(y.mean())  # type: ignore[operator]
            return y  # type: ignore[no-any-return]

    assert ConvBn()(trace(Adapting(), torch.randn(2, 3, 4, 4))).matches == 0
