"""Small models of sounds with random weights, as folders of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LABELS = {0: "bark", 1: "purr", 2: "silence"}
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"etaoinshrdlucmwfgypbvk'xjqz"]
_CONVOLUTIONS: dict[str, Any] = {"conv_dim": (16,) * 3, "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 4)}


def classifier(folder: Path, *, mask: bool = False, **options: Any) -> Path:
    """Save a Wav2Vec2 that classifies; one with a mask normalizes layers, as those of transformers do."""
    from transformers import Wav2Vec2ForSequenceClassification

    config = _wav2vec2(mask, id2label=LABELS, classifier_proj_size=16, **options)
    return _saved(folder, Wav2Vec2ForSequenceClassification, config, mask)


def recognizer(folder: Path, *, mask: bool = False, **options: Any) -> Path:
    """Save a Wav2Vec2 with CTC, and the tokenizer of its letters."""
    from transformers import Wav2Vec2ForCTC

    config = _wav2vec2(mask, vocab_size=len(LETTERS), pad_token_id=0, **options)
    _saved(folder, Wav2Vec2ForCTC, config, mask)
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(LETTERS)}))
    _made("Wav2Vec2CTCTokenizer", vocab_file=str(folder / "vocab.json")).save_pretrained(folder)
    return folder


def spectrogram_transformer(folder: Path) -> Path:
    """Save an AST, with 100 frames of 32 bins."""
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(**_SMALL, max_length=100, num_mel_bins=32, id2label=LABELS)
    _seeded(ASTForAudioClassification, config).save_pretrained(folder)
    _made("ASTFeatureExtractor", num_mel_bins=32, max_length=100).save_pretrained(folder)
    return folder


def whisper(folder: Path) -> Path:
    """Save a Whisper that classifies two seconds."""
    from transformers import WhisperConfig, WhisperForAudioClassification

    config = WhisperConfig(
        d_model=16,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        num_mel_bins=20,
        max_source_positions=100,
        vocab_size=100,
        pad_token_id=0,
        classifier_proj_size=16,
        id2label=LABELS,
    )
    _seeded(WhisperForAudioClassification, config).save_pretrained(folder)
    _made("WhisperFeatureExtractor", feature_size=20, chunk_length=2).save_pretrained(folder)
    return folder


_SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.5,
}


def _wav2vec2(mask: bool, **options: Any) -> Any:
    from transformers import Wav2Vec2Config

    norm = "layer" if mask else "group"
    return Wav2Vec2Config(
        **_SMALL,
        **_CONVOLUTIONS,
        **options,
        feat_extract_norm=norm,
        do_stable_layer_norm=mask,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )


def _saved(folder: Path, model: Any, config: Any, mask: bool) -> Path:
    _seeded(model, config).save_pretrained(folder)
    _made("Wav2Vec2FeatureExtractor", return_attention_mask=mask).save_pretrained(folder)
    return folder


def _seeded(model: Any, config: Any) -> Any:
    import torch

    torch.manual_seed(0)
    return model(config).eval()


def _made(name: str, **options: Any) -> Any:
    """Return an object of a class of transformers whose constructor has no types."""
    import transformers

    return getattr(transformers, name)(**options)
