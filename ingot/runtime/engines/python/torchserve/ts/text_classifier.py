"""``ts.torch_handler.text_classifier``: scores of classes for the words of a text, and for pairs of these.

Source: ts/torch_handler/text_classifier.py of https://github.com/pytorch/serve 0.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.runtime.engines.python.torchserve.ts.text_handler import TextHandler
from ingot.runtime.engines.python.torchserve.ts.text_utils import ngrams_iterator
from ingot.runtime.engines.python.torchserve.ts.util import map_class_to_label


class TextClassifier(TextHandler):
    """Answers with ``{name: score}`` of all classes; it reads one text at a time."""

    ngrams = 2

    def preprocess(self, data: Sequence[dict[str, Any]]) -> Any:
        """Return the numbers of words and pairs, int64[tokens], and the words."""
        import torch

        text: Any = data[0].get("data") or data[0].get("body")
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8")
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        words = self._tokenize(self._remove_punctuation(self._remove_accented_characters(text)))
        numbers = [self.source_vocab[word] for word in ngrams_iterator(words, self.ngrams)]
        return torch.as_tensor(numbers, device=self.device), words

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the numbers, and with the places where texts begin: 0."""
        import torch

        numbers, _ = data
        return super().inference(numbers, torch.as_tensor([0], device=self.device))

    def postprocess(self, data: Any) -> Any:
        """Return ``{name: score}`` of the text."""
        import torch

        return map_class_to_label(torch.nn.functional.softmax(data, dim=1).tolist(), self.mapping)
