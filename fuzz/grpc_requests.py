"""Messages of gRPC, fast against protobuf: ``make fuzz``, or ``python -m fuzz.grpc_requests [-max_total_time=60]``.

An input is two messages. The fast decoder, which remembers the parts of the first, must read the second exactly as
protobuf's parser and the plain decoder do, or refuse it as they do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["ingot.protocol", "ingot.server.grpc"]):
    from ingot.errors import IngotError
    from ingot.protocol import open_inference_pb2 as pb
    from ingot.protocol import proto_codec
    from ingot.protocol.requests import InferRequest
    from ingot.server.grpc.protobuf_memo import Codec
    from tests.server.echo_peer import request


def target(data: bytes) -> None:
    """Decode the second message in both ways, after the fast decoder has seen the first."""
    cut = int.from_bytes(data[:2], "big")
    first, second = data[2 : 2 + cut], data[2 + cut :]
    fast = Codec(_found)
    for message in (first, first, second, second):
        expected, found = _outcome(_plain, message), _outcome(lambda raw: _fast(fast, raw), message)
        if expected != found:
            raise AssertionError(f"{message!r}: {expected} is read as {found}")


def _plain(data: bytes) -> InferRequest:
    return proto_codec.decode_request(proto_codec.parse(pb.ModelInferRequest, data), _found)


def _fast(fast: Codec, data: bytes) -> InferRequest:
    found = fast.decode(data)
    return (found() if callable(found) else found)[0]


def _outcome(decode: Any, data: bytes) -> tuple[Any, ...]:
    """Return the contents of a request, or the class of the refusal."""
    try:
        found: InferRequest = decode(data)
    except IngotError as error:
        return (type(error).__name__,)
    template = found.template
    inputs = [(name, array.dtype.str, array.shape, array.tolist()) for name, array in found.inputs.items()]
    head = (template.model, template.version, template.outputs, dict(template.parameters), found.id)
    return (repr(head), repr(inputs))


def _found(model: str, version: str) -> None:
    """Accept every model."""


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix="ingot-fuzz-")) / "corpus"
    corpus.mkdir()
    several = pb.ModelInferRequest(model_name="m", model_version="1", id="abc")
    several.inputs.add(name="a", datatype="INT64", shape=[2])
    several.inputs.add(name="b", datatype="BYTES", shape=[1])
    several.outputs.add(name="y")
    several.parameters["priority"].int64_param = 1
    several.raw_input_contents.extend([bytes(16), b"\x01\0\0\0x"])
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="a", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    messages = [
        *(request(1, 2), request(3, 4), request(3, 4, request_id="a"), request(1, 2, request_id="longer")),
        *(several.SerializeToString(), typed.SerializeToString()),
    ]
    for number, first in enumerate(messages):
        for other, second in enumerate(messages):
            (corpus / f"{number}-{other}").write_bytes(len(first).to_bytes(2, "big") + first + second)
    atheris.Setup([*sys.argv, str(corpus), "-max_len=2000"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
