"""``ingot inspect --report``: the report in an archive, checked and shown anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.output import printable
from ingot.errors import InvalidArchive, InvalidArgument, NotFound

if TYPE_CHECKING:
    from ingot.export.report import Report
    from ingot.model_store import Archive, Variant

SUFFIXES = (".html", ".json", ".txt")
_DOCUMENT = "report.json"
# The report of a model of ten thousand operations has some 6 MiB.
_MAX_BYTES = 16 << 20


def write(archive: Archive, path: Path) -> str:
    """Write an archive's report as the file's suffix says, and return the name of the variant that carries it.

    Only the data of the report is taken from the archive. The page and the text are made of it here: those that the
    archive holds could run scripts, or drive a terminal.

    Raises:
        InvalidArgument: the suffix is none of :data:`SUFFIXES`.
        NotFound: no variant carries a report.
        InvalidArchive: the report is none, or is too large to be one.
    """
    from ingot.model_store.blobs import atomic_file

    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"a report cannot be written as {path.name}; end its name in {', '.join(SUFFIXES)}")
    variant, report = _read(archive)
    content = _show(report, path.suffix).encode()
    with atomic_file(path) as stream:
        stream.write(content)
    return variant.name


def _read(archive: Archive) -> tuple[Variant, Report]:
    from ingot.export.report import Report
    from ingot.model_store import manifest

    for variant in archive.variants:
        where = f"the {_DOCUMENT} of variant '{variant.name}'"
        if _size(variant) > _MAX_BYTES:
            raise InvalidArchive(f"{where} is larger than {_MAX_BYTES >> 20} MiB, which no export writes")
        if (raw := variant.document(_DOCUMENT)) is not None:
            return variant, manifest.decode(Report, raw, where)
    raise NotFound(f"the archive carries no {_DOCUMENT}; export the model again to have one")


def _size(variant: Variant) -> int:
    """Return how large the documents of the report's name are by the manifest, which bounds what is read of them."""
    from ingot.model_store import manifest

    layers = [layer for layer in variant.manifest.layers if layer.annotations.get(manifest.FILEPATH) == _DOCUMENT]
    return max((layer.size for layer in layers), default=0)


def _show(report: Report, suffix: str) -> str:
    from ingot.export.report.page import html
    from ingot.export.report.view import text

    if suffix == ".json":  # in ASCII, whose control characters JSON escapes
        return json.dumps(report.model_dump(mode="json"), indent=1)
    return printable(html(report) if suffix == ".html" else text(report))
