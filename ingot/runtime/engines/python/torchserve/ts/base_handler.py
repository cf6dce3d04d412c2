"""``ts.torch_handler.base_handler``: the class that most handlers derive from.

Source: ts/torch_handler/base_handler.py of https://github.com/pytorch/serve 0.12, whose steps it has.
"""

from __future__ import annotations

import abc
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.runtime.engines.python.torchserve.rows import EXPLAIN, EXPLAINS
from ingot.runtime.engines.python.torchserve.ts.context import Context
from ingot.runtime.engines.python.torchserve.ts.util import list_classes_from_module, load_label_mapping


class BaseHandler(abc.ABC):  # noqa: B024 - handlers may ask for its metaclass
    """Loads a model, and answers by ``preprocess``, ``inference`` and ``postprocess``.

    PyTorch is imported by the methods that need it: those that a handler overrides need not.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.map_location: str | None = None
        self.initialized = False
        self.context: Context | None = None
        self.manifest: Any = None
        self.model_yaml_config: Any = {}
        self.model_pt_path: str | None = None
        self.explain = False
        self.target = 0

    def initialize(self, context: Context) -> None:
        """Load the model that the manifest names, and the names of classes.

        Raises:
            RuntimeError: it is of no kind that can be loaded.
        """
        import torch

        properties = context.system_properties
        gpu = properties.get("gpu_id")
        self.map_location = "cuda" if gpu is not None and torch.cuda.is_available() else "cpu"
        self.device = torch.device(f"cuda:{gpu}" if self.map_location == "cuda" else "cpu")
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = context.model_yaml_config
        folder, named = properties["model_dir"], self.manifest["model"]
        if serialized := named.get("serializedFile"):
            self.model_pt_path = str(Path(folder, serialized))
        if code := named.get("modelFile"):
            self.model = self._load_pickled_model(folder, code, self.model_pt_path).to(self.device).eval()
        elif self.model_pt_path is not None:
            self.model = self._load(self.model_pt_path)
        self.mapping = load_label_mapping(str(Path(folder, "index_to_name.json")))
        self.initialized = True

    def _load(self, path: str) -> Any:
        if path.endswith(".onnx"):
            import onnxruntime

            return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        if path.endswith(".pt2"):
            import torch

            return torch.export.load(path).module().to(self.device)
        if path.endswith(".pt"):
            return self._load_torchscript_model(path).eval()
        raise RuntimeError(f"{Path(path).name} is neither .pt, .pt2 nor .onnx, and the manifest names no modelFile")

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        import torch

        return torch.jit.load(model_pt_path, map_location=self.device)  # type: ignore[no-untyped-call]

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """Return the only class of a module of the archive, with the weights of a file.

        Raises:
            ValueError: the module has several classes, or none.
        """
        import torch

        module = importlib.import_module(Path(model_file).stem)
        classes = list_classes_from_module(module)
        if len(classes) != 1:
            raise ValueError(f"{model_file} must define one class, but it has {len(classes)}")
        model = classes[0]()
        if model_pt_path is not None:
            model.load_state_dict(torch.load(model_pt_path, map_location=self.device, weights_only=True))
        return model

    def preprocess(self, data: Any) -> Any:
        """Return the batch as a tensor."""
        import torch

        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the outputs of an ONNX graph are a tensor, or a list of several."""
        import torch

        if hasattr(self.model, "get_inputs"):
            return self._run_graph(data)
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def _run_graph(self, data: Any) -> Any:
        import torch

        found = self.model.run(None, {self.model.get_inputs()[0].name: data.cpu().numpy()})
        outputs = [torch.from_numpy(each) for each in found]
        return outputs[0] if len(outputs) == 1 else outputs

    def postprocess(self, data: Any) -> Any:
        """Return a list with the result of each sample."""
        return data.tolist()

    def handle(self, data: Sequence[dict[str, Any]], context: Context) -> Any:
        """Answer a batch."""
        began = time.perf_counter()
        self.context = context
        prepared = self.preprocess(data)
        explains = self._is_explain()
        output = self.explain_handle(prepared, data) if explains else self.postprocess(self.inference(prepared))
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return output

    def explain_handle(self, data_preprocess: Any, raw_data: Sequence[dict[str, Any]]) -> Any:
        """Return the explanations of a batch by ``get_insights``, which the handler must have."""
        row = raw_data[0]
        target = row.get("target") or 0
        return self.get_insights(data_preprocess, row.get("data") or row.get("body"), target)  # type: ignore[attr-defined]

    def _is_explain(self) -> bool:
        return self.context is not None and self.context.get_request_header(0, EXPLAIN) == EXPLAINS
