"""Pictures and sounds through a server's port: ``make fuzz``, or ``python -m fuzz.decoders [-max_total_time=60]``.

An input is a file, mutated by libFuzzer or by :func:`benchmarks.reliability.decoders.mutated`. The server must answer
200 exactly for those that decode in this process too, whose Python code libFuzzer observes, and 4xx for all others. A
decoder that ends its process is a finding here, though it costs a client only its own request.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["PIL", "soundfile", "ingot.steps"]):
    from benchmarks.reliability.decoders import Target, mutated, seeds, serving
    from ingot.errors import IngotError
    from ingot.steps.images.image import Image
    from ingot.steps.item import Item
    from ingot.steps.sounds.audio import Audio
    from tests.server.test_sound_steps import RATE

_SEEDS = seeds()
_FILES = [content for files in _SEEDS.values() for content in files]


def mutate(data: bytes, limit: int, seed: int) -> bytes:
    """Change a file as formats of pictures are damaged, or let libFuzzer do as it likes."""
    dice = random.Random(seed)
    if dice.random() < 0.5:
        return bytes(atheris.Mutate(data, limit))
    return mutated(data if len(data) > 16 and dice.random() < 0.5 else dice.choice(_FILES), _FILES, dice)[:limit]


def decodes(item: Item, data: bytes) -> bool:
    """Return whether a file is one that the step accepts in this process."""
    try:
        item(data)
    except IngotError:
        return False
    return True


def main() -> None:
    corpus = Path(tempfile.mkdtemp(prefix="ingot-fuzz-"))
    for number, content in enumerate(_FILES):
        (corpus / str(number)).write_bytes(content)
    items = {"colour": Image().item(), "level": Audio(rate=RATE).item()}
    with serving() as (server, port):
        connection = Target(port)

        def target(data: bytes) -> None:
            if not data:
                return
            for model, item in items.items():
                status, text = connection.file(model, data)
                right = status == 200 if decodes(item, data) else 400 <= status < 500
                if not right or server.poll() is not None:
                    raise AssertionError(f"{model}: {status}: {text}")

        atheris.Setup([*sys.argv, str(corpus), "-max_len=200000"], target, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
