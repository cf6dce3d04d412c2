"""Folders of small detectors and segmentations of transformers, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LABELS = {0: "cat", 1: "dog", 2: "ship"}
_HEADS: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32}
_LAYERS: dict[str, Any] = {"decoder_ffn_dim": 32, "decoder_layers": 1, "d_model": 16}
_BOUNDED: dict[str, Any] = {"size": {"shortest_edge": 64, "longest_edge": 96}}
_RESNET: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}


def yolos(folder: Path) -> Path:
    """A detector that keeps the aspect ratio of pictures."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessorPil

    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[64, 96],
        num_detection_tokens=7,
        initializer_range=0.5,
        id2label=LABELS,
    )
    processor = YolosImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 96})
    return _saved(YolosForObjectDetection, config, processor, folder)


def detr(folder: Path) -> Path:
    """A detector that reads a mask of padding."""
    from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessorPil

    processor = DetrImageProcessorPil(**_BOUNDED)
    return _saved(DetrForObjectDetection, DetrConfig(**_detr()), processor, folder)


def conditional_detr(folder: Path) -> Path:
    """A detector that reads a mask of padding, and whose boxes are the best pairs of query and class."""
    from transformers import (
        ConditionalDetrConfig,
        ConditionalDetrForObjectDetection,
        ConditionalDetrImageProcessorPil,
    )

    processor = ConditionalDetrImageProcessorPil(**_BOUNDED)
    return _saved(ConditionalDetrForObjectDetection, ConditionalDetrConfig(**_detr()), processor, folder)


def _detr() -> dict[str, Any]:
    from transformers import ResNetConfig

    backbone: dict[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    backbone["backbone_config"] = ResNetConfig(**_RESNET, **_stages("stage4"))
    return {**backbone, "init_std": 0.5, "encoder_layers": 1, "num_queries": 7, "id2label": LABELS, **_HEADS, **_LAYERS}


def rt_detr(folder: Path) -> Path:
    """A detector of stretched pictures, whose boxes are the best pairs of query and class."""
    import torch
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrImageProcessorPil, RTDetrResNetConfig

    config = RTDetrConfig(
        backbone_config=RTDetrResNetConfig(**_RESNET, **_stages("stage2", "stage3", "stage4")),
        encoder_hidden_dim=16,
        encoder_in_channels=[8, 16, 16],
        decoder_in_channels=[16, 16, 16],
        num_queries=12,
        id2label=LABELS,
        **_HEADS,
        **_LAYERS,
    )
    saved = _saved(RTDetrForObjectDetection, config, RTDetrImageProcessorPil(size={"height": 64, "width": 64}), folder)
    model = RTDetrForObjectDetection.from_pretrained(saved)
    torch.manual_seed(0)
    for each in model.parameters():  # with the usual weights, all anchors have the same score
        if each.dim() > 1:
            torch.nn.init.normal_(each, std=2.5 * each[0].numel() ** -0.5)
    model.save_pretrained(saved)
    return saved


def segformer(folder: Path) -> Path:
    """A semantic segmentation."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessorPil

    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        initializer_range=0.5,
        id2label=LABELS,
    )
    processor = SegformerImageProcessorPil(size={"height": 64, "width": 64})
    return _saved(SegformerForSemanticSegmentation, config, processor, folder)


def _stages(*names: str) -> dict[str, Any]:
    return {"layer_type": "basic", "out_features": [*names]}


def _saved(kind: Any, config: Any, processor: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model = kind(config)
    for each in model.parameters():
        if each.dim() > 1 and not each.any():  # with the usual zeros, all queries of YOLOS are equal
            torch.nn.init.normal_(each)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
