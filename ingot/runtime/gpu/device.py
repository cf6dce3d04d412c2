"""What a pipeline needs of a GPU: streams, events, memory and copies between its memory and the host's."""

from __future__ import annotations

from typing import Protocol


class Device(Protocol):
    """One GPU. Any thread may call it, and no method but ``synchronize`` and ``close_stream`` waits for the GPU.

    Streams, events and memory are numbers: handles and addresses of the device's library. A stream runs its work in
    order and after the calls that enqueued it return; work of different streams is only ordered by events.

    Every method may raise EngineLost once the device has failed for good; ``lost`` is then the reason, and empty
    otherwise. Other failures are InternalError. ``copy_across``, ``open_shared`` and ``close_shared`` are called for
    NVIDIA's GPUs only: for tensors of clients and other libraries in their memory.
    """

    name: str
    """Kind and index, such as ``cuda:0``."""
    lost: str

    def stream(self) -> int:
        """Create a stream."""
        ...

    def close_stream(self, stream: int) -> None:
        """Wait until a stream's work is done, and destroy it."""
        ...

    def event(self) -> int:
        """Create an event."""
        ...

    def close_event(self, event: int) -> None:
        """Destroy an event."""
        ...

    def record(self, event: int, stream: int) -> None:
        """Let an event occur when the work that is in the stream now is done. An event can be recorded again."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """Let work that is enqueued in the stream from now on wait for the last record of the event."""
        ...

    def synchronize(self, event: int) -> None:
        """Block this thread until the event occurs, without spinning and without the interpreter lock."""
        ...

    def pin(self, nbytes: int) -> int | None:
        """Allocate host memory that the device accesses directly, for all devices; None if there is none left."""
        ...

    def unpin(self, address: int) -> None:
        """Free memory of :meth:`pin`; no work may use it any more."""
        ...

    def allocate(self, nbytes: int, stream: int) -> int:
        """Allocate memory of the device, for work in the stream from now on, and for work that waits for that.

        Raises:
            TooLarge: there is not enough left.
        """
        ...

    def free(self, address: int, stream: int) -> None:
        """Free memory of :meth:`allocate` after the work that is in the stream now."""
        ...

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from the host's memory to the device's."""
        ...

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from the device's memory to the host's."""
        ...

    def copy_across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy within the device's memory."""
        ...

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        """Map memory of the device that another process has exported; return its address and its bytes.

        Raises:
            InvalidArgument: the handle cannot be opened.
        """
        ...

    def close_shared(self, address: int) -> None:
        """Unmap memory of :meth:`open_shared`; no work may use it any more."""
        ...
