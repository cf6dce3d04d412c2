"""``inference.py`` of SageMaker's PyTorch containers as a handler: its ``model_fn``, ``input_fn`` and so on.

Source: sagemaker_pytorch_serving_container/default_pytorch_inference_handler.py of
https://github.com/aws/sagemaker-pytorch-inference-toolkit, and transformer.py, decoder.py and encoder.py of
https://github.com/aws/sagemaker-inference-toolkit.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.runtime.engines.python import files
from ingot.runtime.engines.python.torchserve.ts.context import Context
from ingot.runtime.engines.python.torchserve.ts.util import PredictionException

SCRIPT = "code/inference.py"
_JSON, _CSV, _NPY = "application/json", "text/csv", "application/x-npy"
_WEIGHTS = (".pt", ".pth")
_UNSUPPORTED = 415


class SageMaker:
    """Calls the functions of a script; those that it lacks are the containers' own. Bodies reach it as bytes."""

    raw = True

    def initialize(self, context: Context) -> None:
        """Import the script, and load its model."""
        import torch

        properties = context.system_properties
        folder, gpu = Path(properties["model_dir"]), properties.get("gpu_id")
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        sys.path.insert(0, str((folder / SCRIPT).parent))
        self._script = files.imported(folder / SCRIPT, "install the package, or pack the file next to inference.py")
        self.model = self._call("model_fn", self._model, context, str(folder))

    def handle(self, data: Sequence[dict[str, Any]], context: Context) -> list[Any]:
        """Answer a batch, one request after the other."""
        return [self._answer(index, row, context) for index, row in enumerate(data)]

    def _answer(self, index: int, row: dict[str, Any], context: Context) -> Any:
        media_type = (context.get_request_header(index, "content-type") or _JSON).partition(";")[0].strip().lower()
        accept = context.get_request_header(index, "accept") or _JSON
        accept = _JSON if accept.startswith("*/*") else accept
        body = bytes(row.get("body", b""))
        content = body.decode() if media_type in (_JSON, _CSV) else body
        found = self._call("transform_fn", self._transform(context), context, self.model, content, media_type, accept)
        result, answered = found if isinstance(found, tuple) else (found, accept)
        context.set_response_content_type(index, answered.partition(",")[0])
        return result

    def _transform(self, context: Context) -> Callable[[Any, Any, str, str], Any]:
        def transform(model: Any, content: Any, media_type: str, accept: str) -> Any:
            data = self._call("input_fn", self._input, context, content, media_type)
            prediction = self._call("predict_fn", self._predict, context, data, model)
            return self._call("output_fn", _output, context, prediction, accept)

        return transform

    def _call(self, name: str, default: Callable[..., Any], context: Context, *values: Any) -> Any:
        """Call a function of the script; one with a further parameter gets the context."""
        function = getattr(self._script, name, default)
        more = (context,) if len(inspect.signature(function).parameters) > len(values) else ()
        return function(*values, *more)

    def _model(self, folder: str) -> Any:
        import torch

        found = [path for path in Path(folder).iterdir() if path.suffix in _WEIGHTS]
        if len(found) != 1:
            raise ValueError(f"the archive has {len(found)} files of {', '.join(_WEIGHTS)}; write model_fn(model_dir)")
        return torch.jit.load(str(found[0]), map_location=self.device)  # type: ignore[no-untyped-call]

    def _input(self, content: Any, media_type: str) -> Any:
        import torch

        if media_type == _JSON:
            return torch.FloatTensor(json.loads(content)).to(self.device)
        if media_type == _CSV:
            return torch.FloatTensor(np.genfromtxt(io.StringIO(content), np.float32, delimiter=",")).to(self.device)
        if media_type == _NPY:
            return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False)).to(self.device)
        raise PredictionException(f"Content type {media_type} is not supported by this framework.", _UNSUPPORTED)

    def _predict(self, data: Any, model: Any) -> Any:
        import torch

        with torch.no_grad():
            return model.to(self.device).eval()(data)


def _output(prediction: Any, accept: str) -> Any:
    import torch

    array = prediction.detach().cpu().numpy() if isinstance(prediction, torch.Tensor) else prediction
    for each in accept.split(","):
        media_type = each.partition(";")[0].strip().lower()
        if media_type == _JSON:
            return json.dumps(array.tolist() if isinstance(array, np.ndarray) else array), _JSON
        stream: Any = io.StringIO() if media_type == _CSV else io.BytesIO()
        if media_type == _CSV:
            np.savetxt(stream, np.array(array), delimiter=",", fmt="%s")
            return stream.getvalue(), _CSV
        if media_type == _NPY:
            np.save(stream, np.array(array))
            return stream.getvalue(), _NPY
    raise PredictionException(f"Content type {accept} is not supported by this framework.", _UNSUPPORTED)
