"""``ts.torch_handler.image_segmenter``: the best class of each pixel.

Source: ts/torch_handler/image_segmenter.py of https://github.com/pytorch/serve 0.12.
"""

from __future__ import annotations

from typing import Any

from ingot.runtime.engines.python.torchserve.ts.transforms import imagenet
from ingot.runtime.engines.python.torchserve.ts.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """Answers with the number of the best class of each pixel, and its score: [height][width][2]."""

    image_processing = staticmethod(imagenet)

    def postprocess(self, data: Any) -> Any:
        """Return the classes and scores of the output ``out``, which has planes of logits."""
        import torch

        best = torch.max(torch.nn.functional.softmax(data["out"], dim=1), dim=1)
        return torch.stack([best.indices.type(best.values.dtype), best.values], dim=3).tolist()
