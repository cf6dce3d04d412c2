"""``ts.torch_handler.image_classifier``: the class that handlers of classifiers derive from. It needs torchvision."""

from __future__ import annotations

from typing import Any

from torchvision import transforms

from ingot.runtime.engines.python.torchserve.ts.util import map_class_to_label
from ingot.runtime.engines.python.torchserve.ts.vision_handler import VisionHandler


class ImageClassifier(VisionHandler):
    """Answers with the names and scores of the best classes."""

    topk = 5
    image_processing = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> Any:
        """Return ``{name: score}`` of each sample, best first."""
        import torch

        scores, classes = torch.topk(torch.nn.functional.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(scores.tolist(), self.mapping, classes.tolist())
