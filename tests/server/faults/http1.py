"""HTTP/1.1 on a raw socket: requests as bytes, sent as a test likes, and answers in order of arrival."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PATH = "/v2/models/affine/infer"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def values(self) -> list[float]:
        """The first output of a JSON answer."""
        content: dict[str, Any] = json.loads(self.body)
        values: list[float] = content["outputs"][0]["data"]
        return values


def body_of(values: Sequence[float], **more: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(values)], "data": list(values)}
    return json.dumps({"inputs": [tensor], **more}).encode()


def request(body: bytes = b"", path: str = PATH, method: str = "POST", *headers: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body or method == "POST":
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


def chunked(body: bytes, size: int, path: str = PATH) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


class Connection:
    """A connection that sends bytes and reads answers."""

    def __init__(self, address: tuple[str, int], timeout: float = 20):
        self.socket = socket.create_connection(address, timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> Answer:
        """Read one answer.

        Raises:
            EOFError: the connection ends instead.
        """
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            self._receive()
        status, *lines = self._received[:end].decode("latin-1").split("\r\n")
        del self._received[: end + 4]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(self._received) < length:
            self._receive()
        body = bytes(self._received[:length])
        del self._received[:length]
        return Answer(int(status.split()[1]), headers, body)

    def answers(self) -> list[Answer]:
        """Read answers until the connection ends or nothing more comes for a second."""
        self.socket.settimeout(1)
        found = []
        try:
            while True:
                found.append(self.answer())
        except (EOFError, TimeoutError, ConnectionResetError):
            return found

    def _receive(self) -> None:
        part = self.socket.recv(1 << 16)
        if not part:
            raise EOFError("the connection has ended")
        self._received += part
