"""The answers of operations as JSON, whatever the protocol; ``operations.py`` lists which operation has which."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import InvalidArgument, Unsupported, quoted
from ingot.protocol.documents import ModelMetadata
from ingot.protocol.json_codec import region_of
from ingot.server.plane import extensions
from ingot.server.plane.dataplane import DataPlane
from ingot.server.triton.cuda_memory import CudaRegion, handle_of
from ingot.serving.control import ELSEWHERE, Control


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation.

    Attributes:
        plane: the server's behaviour.
        control: of the models, on the management listener.
        client: who calls: the name of a key, or a number of the connection.
        content: the body's JSON object.
        model: from the path, as ``version``, ``region`` and ``repository``; empty where the path has none. A server has
            one repository, whatever a client calls it.
        query: the part of the URL behind the path, of APIs that have parameters there.
    """

    plane: DataPlane
    control: Control | None
    client: Hashable
    content: Mapping[str, Any]
    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""
    query: str = ""

    @property
    def controlled(self) -> Control:
        """The control of the models.

        Raises:
            Unsupported: this is not the management listener.
        """
        if self.control is None:
            raise Unsupported(ELSEWHERE)
        return self.control

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters in the body.

        Raises:
            InvalidArgument: they are not an object.
        """
        parameters = self.content.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("'parameters' must be an object")
        return parameters


@dataclass(frozen=True, slots=True)
class Events:
    """The answer of an operation as server-sent events.

    Attributes:
        items: JSON objects, an event each. An error before the first has its own status; later it is an event.
        end: the event behind the last one.
    """

    items: AsyncGenerator[Any]
    end: bytes = b""


async def live(call: Call) -> dict[str, Any]:
    """Answer that the process runs."""
    return {"live": True}


async def ready(call: Call) -> dict[str, Any]:
    """Return whether every model is ready and the server accepts requests."""
    return {"ready": call.plane.ready}


async def models(call: Call) -> dict[str, Any]:
    """List the models, with an entry per version."""
    return extensions.models(call.plane)


async def statistics(call: Call) -> dict[str, Any]:
    """Return the statistics of a version, of all versions of a model, or of all models."""
    return extensions.statistics(call.plane, call.model, call.version)


async def configuration(call: Call) -> dict[str, Any]:
    """Return the part of a model's configuration that Triton's clients read."""
    return extensions.configuration(call.plane, call.model, call.version)


async def model_metadata(call: Call) -> ModelMetadata:
    """Return a model's versions, platform, inputs, outputs and properties."""
    return extensions.metadata(call.plane, call.model, call.version)


async def model_ready(call: Call) -> dict[str, Any]:
    """Return whether a model is ready."""
    return {"name": call.model, "ready": call.plane.model_ready(call.model, call.version)}


async def log_settings(call: Call) -> dict[str, Any]:
    """Return the log settings, after changing them if the body has settings."""
    return await change_log_settings(call) if call.content else call.plane.logs.content


async def change_log_settings(call: Call) -> dict[str, Any]:
    """Change what the server logs, and return it."""
    call.plane.logs.change(call.content, call.client, managed=call.control is not None)
    return call.plane.logs.content


async def index(call: Call) -> list[dict[str, str]]:
    """Return Triton's index of the repository; with ``ready`` only models that are ready."""
    return call.controlled.index(ready=_flag(call.content, "ready"))


async def load(call: Call) -> dict[str, Any]:
    """Load a model, and return its state."""
    parameters = call.parameters
    return (await call.controlled.load(call.model, parameters)).status()


async def unload(call: Call) -> dict[str, Any]:
    """Unload a model, or one version as ``name:version``."""
    parameters = call.parameters
    name, _, version = call.model.partition(":")
    await call.controlled.unload(name, version, _flag(parameters, "unload_dependents"))
    return {}


async def status(call: Call) -> list[dict[str, Any]]:
    """Return the state of each deployment."""
    return call.controlled.status()


async def canary(call: Call) -> Any:
    """Begin or change the canary of a model."""
    return await call.controlled.canary(call.model, call.content)


async def stop_canary(call: Call) -> Any:
    """Stop the canary of a model."""
    return await call.controlled.stop_canary(call.model)


async def reload(call: Call) -> dict[str, Any]:
    """Load what the sources of all models, or of ``name``, refer to now."""
    name = call.content.get("name", "")
    if not isinstance(name, str):
        raise InvalidArgument("'name' must be a text")
    return await call.controlled.reload(name)


async def memory_status(call: Call) -> list[dict[str, Any]]:
    """Return the client's regions of system shared memory, or one of them."""
    return call.plane.memory.status(call.client, call.region)


async def register_memory(call: Call) -> dict[str, Any]:
    """Register a region of system shared memory."""
    call.plane.memory.register(call.client, call.region, *region_of(call.content))
    return {}


async def unregister_memory(call: Call) -> dict[str, Any]:
    """Forget a region of system shared memory, or all of the client."""
    call.plane.memory.unregister(call.client, call.region)
    return {}


async def cuda_memory_status(call: Call) -> list[dict[str, Any]]:
    """Return the client's regions of CUDA memory, or one of them."""
    return call.plane.memory.status(call.client, call.region, CudaRegion)


async def register_cuda_memory(call: Call) -> dict[str, Any]:
    """Register a region of CUDA memory."""
    call.plane.memory.register_cuda(call.client, call.region, *handle_of(call.content))
    return {}


async def unregister_cuda_memory(call: Call) -> dict[str, Any]:
    """Forget a region of CUDA memory, or all of the client."""
    call.plane.memory.unregister(call.client, call.region, CudaRegion)
    return {}


def _flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{name}' is {quoted(value)}; it must be true or false")
    return value
