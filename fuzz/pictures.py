"""Files of pictures through a server's port: ``make fuzz``, or ``python -m fuzz.pictures [-max_total_time=60]``.

An input is a file, mutated by libFuzzer or by :func:`benchmarks.reliability.pictures.mutated`. The server must answer
200 exactly for those that decode in this process too, whose Python code libFuzzer observes, and 4xx for all others. A
decoder that ends its process is a finding here, though it costs a client only its own request.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["PIL", "ingot.steps"]):
    from benchmarks.reliability.pictures import Target, mutated, seeds, serving
    from ingot.errors import IngotError
    from ingot.steps.images.decoding import Limits, decode, prepare

_SEEDS = seeds()


def mutate(data: bytes, limit: int, seed: int) -> bytes:
    """Change a file as formats of pictures are damaged, or let libFuzzer do as it likes."""
    dice = random.Random(seed)
    if dice.random() < 0.5:
        return bytes(atheris.Mutate(data, limit))
    return mutated(data if len(data) > 16 and dice.random() < 0.5 else dice.choice(_SEEDS), _SEEDS, dice)[:limit]


def decodes(data: bytes) -> bool:
    """Return whether a file is a picture, as this process sees it."""
    try:
        decode(data, Limits())
    except IngotError:
        return False
    return True


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix="ingot-fuzz-"))
    for number, content in enumerate(_SEEDS):
        (corpus / str(number)).write_bytes(content)
    prepare()
    with serving() as (server, port):
        connection = Target(port)

        def target(data: bytes) -> None:
            if not data:
                return
            status, text = connection.picture(data)
            right = status == 200 if decodes(data) else 400 <= status < 500
            if not right or server.poll() is not None:
                raise AssertionError(f"{status}: {text}")

        atheris.Setup([*sys.argv, str(corpus), "-max_len=200000"], target, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
