"""The package ``ts`` for handlers that import it: what handlers use of TorchServe's, found under its names.

It can be imported only in an engine process that runs a handler; see :func:`install`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VERSION = "0.12.0"
"""The version of TorchServe that handlers see."""

_CONTEXT, _UTIL, _METRICS = "context", "util", "metrics"
_HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "mlflow",
    "object_detector",
    "sagemaker",
    "text_classifier",
    "text_handler",
    "vision_handler",
)
_MODULES = {
    "ts.context": _CONTEXT,
    "ts.handler_utils.text_utils": "text_utils",
    "ts.handler_utils.timer": _UTIL,
    "ts.handler_utils.utils": "streaming",
    "ts.metrics.dimension": _METRICS,
    "ts.metrics.metric_type_enum": _METRICS,
    "ts.metrics.metrics_store": _METRICS,
    "ts.protocol.otf_message_handler": "streaming",
    **{f"ts.torch_handler.{name}": name for name in _HANDLERS},
    "ts.utils.util": _UTIL,
}
_PACKAGES = {"ts", *(name.rpartition(".")[0] for name in _MODULES)}


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in _PACKAGES:
            return ModuleType(spec.name)
        return importlib.import_module(f"{__name__}.{_MODULES[spec.name]}")

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "ts":
            module.__dict__["__version__"] = VERSION


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _PACKAGES or fullname in _MODULES:
            return ModuleSpec(fullname, _Loader(), is_package=fullname in _PACKAGES)
        return None


def install() -> None:
    """Let this process import ``ts``, in place of an installed one."""
    sys.meta_path.insert(0, _Finder())
