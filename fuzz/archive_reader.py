"""The archive reader: ``make fuzz``, or ``python -m fuzz.archive_reader [CORPUS] [-max_total_time=60]``.

An input is a file that somebody calls an archive. Opening, checking, unpacking and pushing it must end in an orderly
error or in an archive whose every blob has its digest; anything else is a finding. libFuzzer's options are taken.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ingot", "tarfile"]):
    from ingot.errors import InvalidArgument
    from ingot.model_store import Archive, Store
    from tests.model_store.samples import archive

_FOLDER = Path(tempfile.mkdtemp(prefix="ingot-fuzz-"))
_FILE = _FOLDER / "a.ingot"


def target(data: bytes) -> None:
    """Read one input in every way that there is."""
    _FILE.write_bytes(data)
    try:
        found = Archive.open(_FILE)
        found.signatures()
        for variant in found.variants:
            variant.goldens()
        Store(_FOLDER / "store").push(found, "fuzzed:latest")
    except InvalidArgument:  # of which InvalidArchive is one
        return
    Store(_FOLDER / "store").get("fuzzed:latest").verify()


def mutate(data: bytes, limit: int, seed: int) -> bytes:
    """Change a few bytes of an archive, mostly in its headers and documents, or let libFuzzer do as it likes."""
    dice = random.Random(seed)
    if dice.random() < 0.3 or len(data) < 1024:
        return bytes(atheris.Mutate(data, limit))
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        block = dice.randrange(len(changed) // 512) * 512
        position = block + dice.choice((dice.randrange(512), dice.randrange(100), 156, dice.randrange(124, 136)))
        if position < len(changed):
            changed[position] = dice.choice((dice.randrange(256), ord("9"), ord("/"), ord("."), 0))
    if dice.random() < 0.1:
        del changed[dice.randrange(len(changed)) :]
    return bytes(changed[:limit])


def main() -> None:
    corpus = _FOLDER / "corpus"
    corpus.mkdir()
    archive().save(corpus / "plain")
    archive().with_signature(b"{}").save(corpus / "signed")
    arguments = [*sys.argv, str(corpus), "-max_len=40000"]
    atheris.Setup(arguments, target, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
