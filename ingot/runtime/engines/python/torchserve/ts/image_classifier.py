"""``ts.torch_handler.image_classifier``: the class that handlers of classifiers derive from."""

from __future__ import annotations

from typing import Any

from ingot.runtime.engines.python.torchserve.ts.transforms import imagenet
from ingot.runtime.engines.python.torchserve.ts.util import map_class_to_label
from ingot.runtime.engines.python.torchserve.ts.vision_handler import VisionHandler


class ImageClassifier(VisionHandler):
    """Answers with the names and scores of the best classes."""

    topk = 5
    image_processing = staticmethod(imagenet)

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> Any:
        """Return ``{name: score}`` of each sample, best first."""
        import torch

        scores, classes = torch.topk(torch.nn.functional.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(scores.tolist(), self.mapping, classes.tolist())
