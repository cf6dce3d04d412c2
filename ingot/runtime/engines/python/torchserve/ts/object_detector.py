"""``ts.torch_handler.object_detector``: boxes of objects, with their names and scores.

Source: ts/torch_handler/object_detector.py of https://github.com/pytorch/serve 0.12.
"""

from __future__ import annotations

from typing import Any

from ingot.runtime.engines.python.torchserve.ts.transforms import to_tensor
from ingot.runtime.engines.python.torchserve.ts.util import map_class_to_label
from ingot.runtime.engines.python.torchserve.ts.vision_handler import VisionHandler


class ObjectDetector(VisionHandler):
    """Answers with ``{name: box, "score": score}`` of each object whose score reaches a threshold."""

    image_processing = staticmethod(to_tensor)
    threshold = 0.5

    def postprocess(self, data: Any) -> Any:
        """Return the objects of each picture, from ``boxes``, ``labels`` and ``scores``."""
        return [self._objects(row) for row in data]

    def _objects(self, row: Any) -> list[dict[str, Any]]:
        kept = row["scores"] >= self.threshold
        boxes, labels, scores = (row[key][kept].tolist() for key in ("boxes", "labels", "scores"))
        named = map_class_to_label([[box] for box in boxes], self.mapping, [[label] for label in labels])
        return [{**each, "score": score} for each, score in zip(named, scores, strict=True)]
