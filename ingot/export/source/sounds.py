"""Descriptions of the inputs of transformers' models of sounds, for exports without any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.steps.sounds.decoding import Limits

RATE = 16_000
"""Samples of a second, in Hz, if the folder does not state it."""
# Kaldi has 100 frames for a second, of which SeamlessM4T's extractor makes 50.
_FRAMES = 50


def inputs_of(module: Any, folder: Path) -> list[str]:
    """Describe the inputs of a model of sounds, up to the longest sound that its steps accept; none of other models."""
    config, extractor = module.config, _extractor(folder)
    longest = Limits().seconds
    if module.main_input_name == "input_values" and hasattr(config, "conv_kernel"):
        rate = int(extractor.get("sampling_rate", RATE))
        length = f"batch,samples={least_samples(config)}..{round(longest * rate)}"
        return _with_mask(f"input_values:float32[{length}]", length, extractor)
    if config.model_type == "audio-spectrogram-transformer":
        return [f"input_values:float32[batch,{config.max_length},{config.num_mel_bins}]"]
    if type(module).__name__ == "WhisperForAudioClassification":
        return [f"input_features:float32[batch,{config.num_mel_bins},{2 * config.max_source_positions}]"]
    if config.model_type == "wav2vec2-bert":
        length = f"batch,frames=1..{round(longest * _FRAMES)}"
        values = f"input_features:float32[{length},{config.feature_projection_input_dim}]"
        return _with_mask(values, length, {"return_attention_mask": True})
    return []


def least_samples(config: Any) -> int:
    """Return the samples that a model with convolutions needs for two frames.

    PyTorch captures sizes of 1 apart from all others, and a sound of one frame has no speech.
    """
    size = 2
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        size = (size - 1) * stride + kernel
    return size


def _with_mask(values: str, length: str, extractor: dict[str, Any]) -> list[str]:
    return [values, *([f"attention_mask:int64[{length}]=0..1"] if extractor.get("return_attention_mask") else [])]


def _extractor(folder: Path) -> dict[str, Any]:
    """Return the configuration of a feature extractor, which a processor's file has within its own."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            found = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            inner = found.get("feature_extractor", found)
            return inner if isinstance(inner, dict) else found
    return {}
