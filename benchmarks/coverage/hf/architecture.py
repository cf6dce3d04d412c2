"""Architectures of ``transformers`` from tiny configurations with random weights: nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

# The names that most configurations share.
TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def build(model_type: str, class_name: str, config: Mapping[str, Any]) -> nn.Module:
    """Return a model of ``transformers`` with random weights.

    Args:
        model_type: as in ``AutoConfig.for_model``.
        class_name: such as ``BertModel``.
        config: differences from the defaults of that configuration.
    """
    transformers = importlib.import_module("transformers")  # optional, and slow to import
    made = transformers.AutoConfig.for_model(model_type, **config)
    module: nn.Module = getattr(transformers, class_name)(made)
    return module
