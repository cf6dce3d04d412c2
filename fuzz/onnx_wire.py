"""The names of external files in graphs: ``make fuzz``, or ``python -m fuzz.onnx_wire [CORPUS] [-max_total_time=60]``.

An input is an encoded ONNX model. Of every model that the onnx package reads, each file that it names is found, or the
model is refused; a file that is missed could be another model's weights.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ingot"]):
    from google.protobuf.message import DecodeError
    from onnx import ModelProto

    from ingot.errors import InvalidArchive
    from ingot.model_store.format import onnx_wire
    from tests.model_store.outside import PLACES, TRICKS, seen


def target(data: bytes) -> None:
    """Look for names of files in one input."""
    try:
        found = set(onnx_wire.locations(data))
    except InvalidArchive:
        return
    try:
        known = set(seen(ModelProto.FromString(data)))
    except DecodeError:
        return
    if not known <= found:
        raise AssertionError(f"missed: {known - found}")


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix="ingot-fuzz-")) / "corpus"
    corpus.mkdir()
    seeds = [*(make().SerializeToString() for make in PLACES.values()), *TRICKS.values()]
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus), "-max_len=4000"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
