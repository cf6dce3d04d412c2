"""``ts.context``: what a handler knows of its model, its batch, and the answers that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.runtime.engines.python.torchserve.rows import HandlerRequest
from ingot.runtime.engines.python.torchserve.ts.metrics import Metrics


@dataclass
class Reply:
    """The status and headers that a handler has set for one answer."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Context:
    """The second argument of handlers.

    Args:
        model_name: the model's name.
        manifest: the content of ``MAR-INF/MANIFEST.json``.
        system_properties: ``model_dir``, ``gpu_id``, ``batch_size``, ``server_name``, ``server_version``.
        model_yaml_config: the content of the model's configuration file.

    Attributes:
        metrics: the handler's own metrics.
        explain: always false; requests for explanations have the header ``explain``.
        request_ids: the id of each request of the batch, by its index.
        replies: the status and headers that the handler has set, by the index of the request.
        parts: the parts of answers that the handler has sent before its result, by the index of the request.
    """

    def __init__(
        self,
        model_name: str,
        manifest: Mapping[str, Any],
        system_properties: Mapping[str, Any],
        model_yaml_config: Mapping[str, Any],
    ):
        self.model_name = model_name
        self.manifest = manifest
        self.system_properties = system_properties
        self.model_yaml_config = model_yaml_config
        self.metrics = Metrics(model_name)
        self.explain = False
        self.begin(())

    def begin(self, requests: Sequence[HandlerRequest]) -> None:
        """Begin a batch of requests, without replies."""
        self._requests = requests
        self.request_ids = {index: request.id for index, request in enumerate(requests)}
        self.replies: dict[int, Reply] = {}
        self.parts: dict[int, list[Any]] = {}

    def get_request_id(self, idx: int = 0) -> str | None:
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.get_all_request_header(idx).get(key.lower())

    def get_all_request_header(self, idx: int) -> Mapping[str, str]:
        return self._requests[idx].headers

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        return self.get_response_headers(idx).get("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status of an answer. The phrase has no effect: HTTP/2 has none, and clients do not read it."""
        self._reply(idx).status = int(code)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for idx in self.request_ids:
            self.set_response_status(code, phrase, idx)

    def get_response_status(self, idx: int) -> tuple[int, str]:
        return self._reply(idx).status, ""

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        self._reply(idx).headers[str(key).lower()] = str(value)

    def get_response_headers(self, idx: int) -> Mapping[str, str]:
        return self._reply(idx).headers

    def _reply(self, idx: int) -> Reply:
        return self.replies.setdefault(idx, Reply())
