"""Folders of small segmentations by queries and models of depth of transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LABELS = {index: f"label{index}" for index in range(6)}
_STAGES = [f"stage{index}" for index in range(1, 5)]
_RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": _STAGES,
}
_DPT_SIZE: dict[str, Any] = {
    "size": {"height": 56, "width": 56},
    "keep_aspect_ratio": True,
    "ensure_multiple_of": 14,
}
_DETR: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_queries": 7,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 64,
}


def detr(folder: Path) -> Path:
    """A segmentation that keeps the aspect ratio of pictures."""
    from transformers import DetrConfig, DetrForSegmentation, DetrImageProcessorPil, ResNetConfig

    config = DetrConfig(backbone_config=ResNetConfig(**_RESNET), id2label=LABELS, **_DETR)
    processor = DetrImageProcessorPil(size={"shortest_edge": 160, "longest_edge": 256})
    return _saved(DetrForSegmentation, config, processor, folder)


def maskformer(folder: Path, **size: int) -> Path:
    """A segmentation whose instances are pairs of query and class."""
    from transformers import (
        DetrConfig,
        MaskFormerConfig,
        MaskFormerForInstanceSegmentation,
        MaskFormerImageProcessorPil,
        ResNetConfig,
    )

    config = MaskFormerConfig(
        backbone_config=ResNetConfig(**_RESNET),
        decoder_config=DetrConfig(backbone_config=ResNetConfig(**_RESNET), **_DETR),
        fpn_feature_size=32,
        mask_feature_size=32,
        id2label=LABELS,
    )
    processor = MaskFormerImageProcessorPil(size=size or {"height": 64, "width": 64})
    return _saved(MaskFormerForInstanceSegmentation, config, processor, folder)


def mask2former(folder: Path) -> Path:
    """A segmentation whose masks are resized first."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessorPil,
        SwinConfig,
    )

    swin: dict[str, Any] = {
        "image_size": 64,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 1, 2, 2],
        "window_size": 4,
        "out_features": _STAGES,
    }
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(**swin),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=7,
        id2label=LABELS,
    )
    processor = Mask2FormerImageProcessorPil(size={"height": 64, "width": 64})
    return _saved(Mask2FormerForUniversalSegmentation, config, processor, folder)


def dpt(folder: Path) -> Path:
    """A model of depth whose input has one size."""
    from transformers import DPTConfig, DPTForDepthEstimation, DPTImageProcessorPil

    config = DPTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        is_hybrid=False,
    )
    return _saved(DPTForDepthEstimation, config, DPTImageProcessorPil(size={"height": 64, "width": 64}), folder)


def depth_anything(folder: Path) -> Path:
    """A model of depth that keeps the aspect ratio of pictures."""
    from transformers import DepthAnythingConfig, DepthAnythingForDepthEstimation, DPTImageProcessorPil

    processor = DPTImageProcessorPil(**_DPT_SIZE)
    return _saved(DepthAnythingForDepthEstimation, DepthAnythingConfig(**_dinov2()), processor, folder)


def prompt_depth_anything(folder: Path) -> Path:
    """A model of depth that also accepts depths as a prompt."""
    from transformers import (
        PromptDepthAnythingConfig,
        PromptDepthAnythingForDepthEstimation,
        PromptDepthAnythingImageProcessorPil,
    )

    # With "metric", a sigmoid of large random numbers would enlarge their rounding.
    config = PromptDepthAnythingConfig(**_dinov2(), depth_estimation_type="relative")
    processor = PromptDepthAnythingImageProcessorPil(**_DPT_SIZE)
    return _saved(PromptDepthAnythingForDepthEstimation, config, processor, folder)


def _dinov2() -> dict[str, Any]:
    from transformers import Dinov2Config

    dinov2: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "out_features": _STAGES,
        "reshape_hidden_states": False,
    }
    return {
        "backbone_config": Dinov2Config(**dinov2),
        "reassemble_hidden_size": 16,
        "neck_hidden_sizes": [8, 8, 16, 16],
        "fusion_hidden_size": 16,
        "head_hidden_size": 8,
        "patch_size": 14,
    }


def glpn(folder: Path) -> Path:
    """A model of depth that keeps the size of pictures."""
    from transformers import GLPNConfig, GLPNForDepthEstimation, GLPNImageProcessorPil

    config = GLPNConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16
    )
    return _saved(GLPNForDepthEstimation, config, GLPNImageProcessorPil(), folder)


def _saved(kind: Any, config: Any, processor: Any, folder: Path) -> Path:
    """Save a model whose answers depend on the picture, and some of whose classes are certain."""
    import torch

    torch.manual_seed(0)
    model = kind(config)
    for name, each in model.named_parameters():
        if each.dim() > 1:
            torch.nn.init.normal_(each, std=_SCALES.get(name.split(".")[-2], 1.3) * each[0].numel() ** -0.5)
    if hasattr(model, "mask_head"):
        # Only attention differs between queries.
        model.mask_head.conv1.conv.weight.data[:, : config.d_model] = 0
        for stage in model.mask_head.fpn_stages:
            torch.nn.init.zeros_(stage.fpn_adapter.weight)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


# Deviations of classes, and of what makes queries differ: where their masks are equal, rounding decides between them.
_SCALES = {
    "class_labels_classifier": 4,
    "class_predictor": 4,
    "query_position_embeddings": 16,
    "q_proj": 4,
    "k_proj": 4,
}
