"""Audio, multimodal and time-series models of ``transformers``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.coverage.case import VOCABULARY, Case, Sizes, integers
from benchmarks.coverage.hf.architecture import TINY, build

_WAVE = "input_values:float32[batch,samples=800..8000]"
_SPEECH = {
    **TINY,
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 4, 2],
    "conv_kernel": [10, 5, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_WHISPER = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_MEL = {"num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 64}
_TARGET = "decoder_input_ids:int64[batch,target=2..64]"


def _wave(model_type: str, class_name: str, **config: Any) -> Case:
    return Case(model_type, "audio", partial(build, model_type, class_name, {**_SPEECH, **config}), (_WAVE,))


AUDIO = (
    _wave("data2vec-audio", "Data2VecAudioModel", conv_pos_kernel_size=3),
    _wave("hubert", "HubertForCTC"),
    _wave("sew", "SEWForCTC"),
    _wave("wav2vec2", "Wav2Vec2ForCTC", pad_token_id=0),
    _wave("wav2vec2-conformer", "Wav2Vec2ConformerModel"),
    _wave("wavlm", "WavLMModel"),
    Case(
        "audio-spectrogram-transformer",
        "audio",
        partial(
            build,
            "audio-spectrogram-transformer",
            "ASTForAudioClassification",
            {**TINY, "max_length": 48, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 4, "time_stride": 4},
        ),
        ("input_values:float32[batch,48,16]",),
    ),
    Case(
        "encodec",
        "audio",
        partial(
            build,
            "encodec",
            "EncodecModel",
            {
                "num_filters": 4,
                "upsampling_ratios": [4, 2],
                "hidden_size": 16,
                "codebook_size": 32,
                "codebook_dim": 16,
                "num_lstm_layers": 1,
                "target_bandwidths": [1.5],
                "sampling_rate": 2400,
            },
        ),
        ("input_values:float32[batch,1,samples=800..8000]",),
    ),
    Case(
        "speech_to_text",
        "audio",
        partial(
            build,
            "speech_to_text",
            "Speech2TextForConditionalGeneration",
            {
                **_WHISPER,
                "input_feat_per_channel": 16,
                "conv_channels": 16,
                "max_source_positions": 200,
                "max_target_positions": 64,
            },
        ),
        ("input_features:float32[batch,frames=16..200,16]", _TARGET),
        constants={"use_cache": False},
    ),
    Case(
        "whisper",
        "audio",
        partial(build, "whisper", "WhisperForConditionalGeneration", {**_WHISPER, **_MEL}),
        ("input_features:float32[batch,16,60]", _TARGET),
        constants={"use_cache": False},
    ),
)

# Models that score every image with every text: their numbers are independent.
_PIXELS = "pixel_values:float32[images,3,32,32]"
_TEXTS = ("input_ids:int64[texts,seq=2..64]", "attention_mask:int64[texts,seq=2..64]")
_SIZES = {"images": (2, 1, 3, 4), "texts": (3, 5, 1, 2)}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VIT = {**TINY, "image_size": 32, "patch_size": 8}
_PAIR = {"text_config": {**TINY, **_TOKENS}, "vision_config": _VIT, "projection_dim": 24}


def _around_image(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Return token ids [batch, seq], the image's 16 (32 x 32 pixels in patches of 8) from position 1 on."""
    ids = torch.randint(5, VOCABULARY, shape, generator=generator)
    ids[:, 1:17] = 3  # llava's image_token_id
    return ids


_IDS, _MASK = "input_ids:int64[batch,seq=2..64]", "attention_mask:int64[batch,seq=2..64]"

MULTIMODAL = (
    Case(
        "clip",
        "multimodal",
        partial(build, "clip", "CLIPModel", _PAIR),
        (_TEXTS[0], _PIXELS, _TEXTS[1]),
        sizes=_SIZES,
    ),
    Case(
        "chinese_clip",
        "multimodal",
        partial(build, "chinese_clip", "ChineseCLIPModel", _PAIR),
        (_TEXTS[0], _PIXELS, _TEXTS[1]),
        sizes=_SIZES,
    ),
    Case(
        "siglip",
        "multimodal",
        partial(build, "siglip", "SiglipModel", _PAIR),
        (_TEXTS[0], _PIXELS, _TEXTS[1]),
        sizes=_SIZES,
    ),
    Case(
        "blip",
        "multimodal",
        partial(build, "blip", "BlipForImageTextRetrieval", _PAIR),
        ("input_ids:int64[batch,seq=2..64]", "pixel_values:float32[batch,3,32,32]", _MASK),
    ),
    Case(
        "git",
        "multimodal",
        partial(build, "git", "GitForCausalLM", {**TINY, **_TOKENS, "vision_config": _VIT}),
        (_IDS, _MASK, "pixel_values:float32[batch,3,32,32]"),
        constants={"use_cache": False},
    ),
    Case(
        "vilt",
        "multimodal",
        partial(build, "vilt", "ViltForQuestionAnswering", {**_VIT, "max_image_length": -1}),
        (_IDS, _MASK, "pixel_values:float32[batch,3,32,32]"),
    ),
    Case(
        "visual_bert",
        "multimodal",
        partial(build, "visual_bert", "VisualBertModel", {**TINY, "visual_embedding_dim": 20}),
        (_IDS, _MASK, "visual_embeds:float32[batch,regions,20]"),
        sizes={"regions": (4, 7, 2, 9)},
    ),
    Case(
        "owlvit",
        "multimodal",
        partial(build, "owlvit", "OwlViTForObjectDetection", {**_PAIR, "projection_dim": 32}),
        (
            "input_ids:int64[batch,seq=2..16]",
            "pixel_values:float32[batch,3,32,32]",
            "attention_mask:int64[batch,seq=2..16]",
        ),
        sizes={"seq": (7, 12, 5, 16)},
    ),
    Case(
        "llava",
        "multimodal",
        partial(
            build,
            "llava",
            "LlavaForConditionalGeneration",
            {
                "text_config": {"model_type": "llama", **TINY, **_TOKENS},
                "vision_config": {"model_type": "clip_vision_model", **_VIT},
                "image_token_index": 3,
                "image_token_id": 3,
                "image_seq_length": 16,
            },
        ),
        (
            "input_ids:int64[batch,seq=20..64]",
            "pixel_values:float32[batch,3,32,32]",
            "attention_mask:int64[batch,seq=20..64]",
        ),
        fills={"input_ids": _around_image, "attention_mask": integers(1, 2)},
        constants={"use_cache": False},
        sizes={"seq": (24, 31, 20, 40)},
    ),
)

SERIES = (
    Case(
        "patchtst",
        "time series",
        partial(
            build,
            "patchtst",
            "PatchTSTForPrediction",
            {
                "num_input_channels": 3,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "num_hidden_layers": 2,
                "d_model": 16,
                "num_attention_heads": 4,
                "ffn_dim": 32,
                "prediction_length": 8,
            },
        ),
        ("past_values:float32[batch,32,3]",),
    ),
    Case(
        "patchtsmixer",
        "time series",
        partial(
            build,
            "patchtsmixer",
            "PatchTSMixerForPrediction",
            {
                "num_input_channels": 3,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "num_layers": 2,
                "d_model": 16,
                "prediction_length": 8,
            },
        ),
        ("past_values:float32[batch,32,3]",),
    ),
)


CASES = (*AUDIO, *MULTIMODAL, *SERIES)
