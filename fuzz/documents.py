"""The documents of an archive: ``make fuzz``, or ``python -m fuzz.documents [CORPUS] [-max_total_time=60]``.

An input is one document of an archive whose digests are right, as somebody who makes archives can have it: its first
byte says which one it replaces. Digests would otherwise stop most changes before they are parsed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ingot"]):
    from ingot.errors import InvalidArgument
    from ingot.model_store import Archive, BlobFolder, Store
    from ingot.model_store.blobs.blobs import read
    from ingot.model_store.blobs.descriptor import Descriptor
    from ingot.model_store.format import manifest
    from ingot.model_store.format.manifest import Index
    from tests.model_store.samples import archive

_FOLDER = Path(tempfile.mkdtemp(prefix="ingot-fuzz-"))
_GOOD = archive()
_VARIANT = _GOOD.variant()
_KINDS = (manifest.INDEX, manifest.MANIFEST, manifest.SERVING, manifest.GOLDENS, manifest.WEIGHT)


def target(data: bytes) -> None:
    """Read an archive with one document replaced."""
    if not data:
        return
    folder = BlobFolder.scratch()
    _GOOD.copy_to(folder)
    try:
        found = Archive(folder, _replaced(folder, _KINDS[data[0] % len(_KINDS)], data[1:]))
        for variant in found.variants:
            variant.goldens()
            list(variant.graphs())
        Store(_FOLDER / "store").push(found, "fuzzed:latest")
    except InvalidArgument:
        return
    Store(_FOLDER / "store").get("fuzzed:latest").verify()


def _replaced(folder: BlobFolder, kind: str, content: bytes) -> Descriptor:
    """Return the index of an archive in which ``content`` stands in place of the document of that kind."""
    new = folder.put(content, kind)
    if kind == manifest.INDEX:
        return new
    if kind != manifest.MANIFEST:
        layers = tuple(
            new.model_copy(update={"annotations": layer.annotations}) if layer.media_type == kind else layer
            for layer in _VARIANT.manifest.layers
        )
        document = _VARIANT.manifest.model_copy(update={"layers": layers})
        new = folder.put(manifest.encode(document), manifest.MANIFEST)
    return folder.put(manifest.encode(Index(manifests=(new,))), manifest.INDEX)


def main() -> None:
    corpus = _FOLDER / "corpus"
    corpus.mkdir()
    seeds = [_GOOD.descriptor, _VARIANT.descriptor]
    seeds += [layer for kind in _KINDS[2:] if (layer := _VARIANT.manifest.layer(kind)) is not None]
    for number, descriptor in enumerate(seeds):
        (corpus / str(number)).write_bytes(bytes([number]) + read(_GOOD.blobs, descriptor))
    atheris.Setup([*sys.argv, str(corpus), "-max_len=20000"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
