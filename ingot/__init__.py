"""Ingot: from a PyTorch model to HTTP and gRPC answers.

The public names below are loaded on first use, so that ``import ingot`` is fast and free of torch. Start in
docs/concepts/architecture.md, then in the ``__init__`` of a package: export, quant, model_store, runtime, serving,
server, client or config.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ingot import _build as _build  # first: it decides how the other modules are loaded
from ingot import errors as errors
from ingot._version import __version__

if TYPE_CHECKING:
    from ingot import steps as steps
    from ingot.client.asynchronous import AsyncClient as AsyncClient
    from ingot.client.blocking import Client as Client
    from ingot.config.keywords import ServerSettings as ServerSettings
    from ingot.errors import IngotError as IngotError
    from ingot.export import export_model as export_model
    from ingot.export import op as op
    from ingot.importing import import_model as import_model
    from ingot.model_store import Archive as Archive
    from ingot.model_store import Store as Store
    from ingot.model_store import Variant as Variant
    from ingot.protocol.documents import ModelMetadata as ModelMetadata
    from ingot.protocol.documents import Statistics as Statistics
    from ingot.quant import QuantConfig as QuantConfig
    from ingot.quant import quantize as quantize
    from ingot.quant.measure.comparison import compare as compare
    from ingot.server.main import RunningServer as RunningServer
    from ingot.server.main import serve as serve
    from ingot.tensors import DType as DType
    from ingot.tensors import Signature as Signature
    from ingot.tensors import TensorSpec as TensorSpec

_PUBLIC = {
    "Archive": "ingot.model_store",
    "AsyncClient": "ingot.client.asynchronous",
    "Client": "ingot.client.blocking",
    "DType": "ingot.tensors",
    "IngotError": "ingot.errors",
    "ModelMetadata": "ingot.protocol.documents",
    "QuantConfig": "ingot.quant",
    "RunningServer": "ingot.server.main",
    "ServerSettings": "ingot.config.keywords",
    "Signature": "ingot.tensors",
    "Statistics": "ingot.protocol.documents",
    "Store": "ingot.model_store",
    "TensorSpec": "ingot.tensors",
    "Variant": "ingot.model_store",
    "compare": "ingot.quant.measure.comparison",
    "export_model": "ingot.export",
    "import_model": "ingot.importing",
    "op": "ingot.export",
    "quantize": "ingot.quant",
    "serve": "ingot.server.main",
}
__all__ = [
    "Archive",
    "AsyncClient",
    "Client",
    "DType",
    "IngotError",
    "ModelMetadata",
    "QuantConfig",
    "RunningServer",
    "ServerSettings",
    "Signature",
    "Statistics",
    "Store",
    "TensorSpec",
    "Variant",
    "__version__",
    "compare",
    "errors",
    "export_model",
    "import_model",
    "op",
    "quantize",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name == "steps":
        return importlib.import_module("ingot.steps")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ingot' has no attribute '{name}'")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
