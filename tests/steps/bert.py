"""Small models of random weights with real tokenizers, as folders of transformers and sentence-transformers."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

WORDS = [
    "a",
    "fine",
    "film",
    "the",
    "story",
    "was",
    "never",
    "dull",
    "and",
    "##s",
    "##ly",
    "##ing",
    "un",
    "##able",
    "good",
    "bad",
    "not",
    "very",
    "café",
    "we",
    "out",
]


def vocabulary() -> list[str]:
    letters = [*string.ascii_lowercase, *string.digits, *".,!?'-()[]{}:;/@#%*_=\"<>|é你好世界"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return list(dict.fromkeys([*special, *WORDS, *letters, *(f"##{letter}" for letter in letters)]))


def tokenizer_file() -> bytes:
    """Return a WordPiece tokenizer; its file asks for padding, which the step must not use."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(vocabulary())}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    made.enable_padding(length=99)
    return str(made.to_str()).encode()


def save(folder: Path, model: str = "BertForSequenceClassification", **config: Any) -> Path:
    """Save a model of BERT with a WordPiece tokenizer."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    words = vocabulary()
    made = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=len(words),
        max_position_embeddings=64,
        initializer_range=0.5,
        **config,
    )
    getattr(transformers, model)(made).eval().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder)
    return folder


def sentence_transformer(folder: Path) -> Path:
    """Save an embedding with mean and max pooling, a dense layer and normalization, and prompts."""
    import torch
    from safetensors.torch import save_file

    save(folder, "BertModel")
    modules = ["Transformer", "Pooling", "Dense", "Normalize"]
    listed = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"models.{kind}"}
        for index, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for item in listed[1:]:
        (folder / str(item["path"])).mkdir()
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    dense = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "a fine ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    return folder


def save_distilbert(folder: Path, model: str, **config: Any) -> Path:
    """Save a model of DistilBERT, whose graph has no types of tokens."""
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    words = vocabulary()
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 64}
    made = transformers.DistilBertConfig(vocab_size=len(words), initializer_range=0.5, **sizes, **config)
    getattr(transformers, model)(made).eval().save_pretrained(folder)
    tokenizer = transformers.DistilBertTokenizer(vocab={word: index for index, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return folder


def save_roberta(folder: Path, model: str, **config: Any) -> Path:
    """Save a model of RoBERTa with a byte-level BPE tokenizer."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    import torch

    torch.manual_seed(0)
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=320, special_tokens=special, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    trained.save_model(str(folder))
    tokenizer = transformers.RobertaTokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = transformers.RobertaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=len(tokenizer),
        max_position_embeddings=66,
        pad_token_id=1,
        initializer_range=0.5,
        **config,
    )
    getattr(transformers, model)(made).eval().save_pretrained(folder)
    return folder
