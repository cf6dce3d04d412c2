"""The models by name. They need only PyTorch, because the peers build them in their own environments."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.quant.models.bert import SentenceEncoder
from benchmarks.quant.models.other import Perceptron, Recurrent, Transformer
from benchmarks.quant.models.vision import MobileNet, ResNet, resnet18

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "minilm": SentenceEncoder,
    "lstm": Recurrent,
    "vit": Transformer,
    "mlp": Perceptron,
    "resnet18": resnet18,
}
