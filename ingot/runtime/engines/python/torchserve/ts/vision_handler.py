"""``ts.torch_handler.vision_handler``: pictures from rows, for handlers that transform them."""

from __future__ import annotations

import abc
import base64
import io
from typing import Any

from ingot.runtime.engines.python.torchserve.ts.base_handler import BaseHandler


class VisionHandler(BaseHandler, abc.ABC):
    """Decodes the pictures of rows, and calls ``image_processing``, an attribute of the handler, with each."""

    image_processing: Any

    def preprocess(self, data: Any) -> Any:
        """Return the pictures [samples, ...]: files, files in base64, or nested lists of numbers."""
        import torch

        return torch.stack([self._picture(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _picture(self, value: Any) -> Any:
        if isinstance(value, str):
            value = base64.b64decode(value)
        if isinstance(value, bytes | bytearray):
            from PIL import Image

            return self.image_processing(Image.open(io.BytesIO(value)))
        import torch

        return torch.FloatTensor(value)
