"""Vision models of ``transformers``: convolutional ones with any size of image, the others with any batch."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.coverage.case import Case, uniform
from benchmarks.coverage.hf.architecture import TINY, build

_FIXED = "pixel_values:float32[batch,3,32,32]"
_FREE = "pixel_values:float32[batch,3,height=32..128,width=32..128]"
# For models whose windows or strides PyTorch's capture cannot follow through other sizes.
_STEPS = "pixel_values:float32[batch,3,height=32..128:32,width=32..128:32]"
_VIT = {key: TINY[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}


_STEPPED = {"height": (64, 96, 32, 128), "width": (96, 64, 128, 32)}


def _case(model_type: str, class_name: str, pixels: str, **config: Any) -> Case:
    return Case(
        model_type,
        "vision",
        partial(build, model_type, class_name, config),
        (pixels,),
        {"pixel_values": uniform(-1, 1)},
        sizes=_STEPPED if pixels == _STEPS else {"height": (48, 64, 40, 96), "width": (64, 40, 56, 48)},
    )


CASES = (
    _case(
        "beit",
        "BeitForImageClassification",
        _FIXED,
        **_VIT,
        image_size=32,
        patch_size=8,
        use_relative_position_bias=True,
    ),
    _case("convnext", "ConvNextForImageClassification", _FREE, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    _case("cvt", "CvtForImageClassification", _FREE, embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3]),
    _case("deit", "DeiTForImageClassification", _FIXED, **_VIT, image_size=32, patch_size=8),
    _case(
        "detr",
        "DetrForObjectDetection",
        _FREE,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=6,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage4"],
        },
        use_timm_backbone=False,
        backbone=None,
    ),
    _case("dinov2", "Dinov2Model", _FREE, **_VIT, image_size=32, patch_size=8),
    _case(
        "dpt",
        "DPTForDepthEstimation",
        _FIXED,
        **{**_VIT, "num_hidden_layers": 4},
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    ),
    _case(
        "efficientnet",
        "EfficientNetModel",
        _FREE,
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.25,
        hidden_dim=320,
    ),
    _case(
        "focalnet",
        "FocalNetForImageClassification",
        _FIXED,
        image_size=32,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 32, 64],
    ),
    _case(
        "levit",
        "LevitForImageClassification",
        _FIXED,
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _case("mobilenet_v2", "MobileNetV2ForImageClassification", _STEPS, depth_multiplier=0.25),
    _case(
        "mobilevit",
        "MobileViTForImageClassification",
        _STEPS,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    ),
    _case("poolformer", "PoolFormerForImageClassification", _FREE, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    _case(
        "pvt_v2",
        "PvtV2ForImageClassification",
        _FREE,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    _case(
        "regnet",
        "RegNetForImageClassification",
        _FREE,
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        groups_width=8,
    ),
    _case(
        "resnet",
        "ResNetForImageClassification",
        _FREE,
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        layer_type="basic",
    ),
    _case(
        "segformer",
        "SegformerForSemanticSegmentation",
        _FREE,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    ),
    _case(
        "swin",
        "SwinForImageClassification",
        _STEPS,
        image_size=64,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _case(
        "swinv2",
        "Swinv2ForImageClassification",
        _FIXED,
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _case(
        "upernet",
        "UperNetForSemanticSegmentation",
        _STEPS,
        hidden_size=16,
        auxiliary_channels=8,
        auxiliary_in_channels=24,
        pool_scales=[1, 2],
        backbone_config={
            "model_type": "convnext",
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        use_timm_backbone=False,
        backbone=None,
    ),
    _case("vit", "ViTForImageClassification", _FIXED, **_VIT, image_size=32, patch_size=8),
    _case(
        "yolos", "YolosForObjectDetection", _FIXED, **_VIT, image_size=[32, 32], patch_size=8, num_detection_tokens=5
    ),
)
