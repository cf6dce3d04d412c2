"""A classifier of texts: paragraphs of the standard library's docstrings, by the kind of module that has them.

It knows the words of programmers' documentation, and no others: of any other text its answer means nothing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

INPUTS = ("input_ids:int64[batch,seq=1..64]", "attention_mask:int64[batch,seq]")
LONGEST = 64
"""Tokens of a text."""
_VOCABULARY = 3000
_CHARACTERS = range(20, 300)
_MODULES = {
    "dates": "datetime _pydatetime calendar time zoneinfo._zoneinfo email.utils _strptime",
    "files": "os shutil pathlib tempfile glob zipfile tarfile fileinput filecmp gzip posixpath fnmatch bz2 lzma stat",
    "network": "socket http.client urllib.request urllib.parse smtplib ftplib ssl imaplib poplib socketserver "
    "http.server http.cookiejar ipaddress selectors xmlrpc.client http.cookies",
    "numbers": "math cmath statistics _pydecimal fractions random numbers colorsys",
    "text": "string re textwrap difflib json json.decoder json.encoder csv html.parser codecs shlex gettext pprint "
    "reprlib locale stringprep unicodedata",
    "threads": "threading asyncio.tasks asyncio.locks asyncio.queues asyncio.base_events asyncio.events queue sched "
    "multiprocessing.pool multiprocessing.managers multiprocessing.context concurrent.futures._base "
    "concurrent.futures.thread concurrent.futures.process asyncio.timeouts asyncio.streams",
}
LABELS = tuple(_MODULES)


@dataclass(frozen=True)
class Texts:
    """Texts, and the index of each one's kind in :data:`LABELS`."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]


def load() -> tuple[Texts, Texts]:
    """Return the training and the held-out set, three quarters and one; the same split for the same Python."""
    found: dict[str, int] = {}
    for label, modules in enumerate(_MODULES.values()):
        for module in modules.split():
            for text in _paragraphs(module):
                found.setdefault(text, label)
    texts = [*found]
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    count = len(texts) * 3 // 4
    parts = ([texts[index] for index in half] for half in (order[:count], order[count:]))
    training, held_out = (Texts(tuple(part), tuple(found[text] for text in part)) for part in parts)
    return training, held_out


def _paragraphs(module: str) -> Iterator[str]:
    for docstring in _docstrings(module):
        for paragraph in re.split(r"\n\s*\n", docstring):
            text = " ".join(paragraph.split())
            if len(text) in _CHARACTERS and ">>>" not in text:
                yield text


def _docstrings(module: str) -> Iterator[str]:
    """Yield the docstrings of a module, if this Python has it: of its source, or of what it has in C."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return
    origin = spec.origin or ""
    if not origin.endswith(".py"):  # in C, or frozen from a file
        found = importlib.import_module(module)
        origin = getattr(found, "__file__", None) or ""
    if not origin.endswith(".py"):
        yield from (member.__doc__ or "" for member in vars(found).values() if callable(member))
        return
    for node in ast.walk(ast.parse(Path(origin).read_bytes())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def tokenizer(texts: Texts) -> bytes:
    """Return a WordPiece tokenizer that is trained on texts, as its ``tokenizer.json``."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=_VOCABULARY, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    made.train_from_iterator(texts.texts, trainer)
    return str(made.to_str()).encode()


class Docstrings(nn.Module):
    """The mean of a vector of each token, and a linear layer: logits of the kinds of modules."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, size)
        self.classify = nn.Linear(size, len(LABELS))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits [B, kinds] for the ids and the mask of tokens, int64[B, S]."""
        mask = attention_mask.unsqueeze(-1).to(torch.float32)  # [B, S, 1]
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)  # [B, size]
        return self.classify(mean)  # type: ignore[no-any-return]


def train(texts: Texts, serialized: bytes, epochs: int = 6) -> Docstrings:
    """Return a model trained by AdamW for some seconds on the tokens that a tokenizer makes of texts."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as for the digits
    model = Docstrings()
    ids, mask = _tokens(texts, serialized)
    labels = torch.tensor(texts.labels)
    loss = nn.CrossEntropyLoss(weight=1 / torch.bincount(labels).to(torch.float32), label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss(model(ids[batch], mask[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def _tokens(texts: Texts, serialized: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    from tokenizers import Tokenizer

    made: Any = Tokenizer.from_str(serialized.decode())
    made.enable_truncation(LONGEST)
    made.enable_padding()
    found = made.encode_batch(list(texts.texts))
    return torch.tensor([each.ids for each in found]), torch.tensor([each.attention_mask for each in found])
