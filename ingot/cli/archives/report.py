"""``--report`` of ``ingot inspect``, ``compare`` and ``diff``: a record, written in the format of the file's suffix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cli.output import printable
from ingot.errors import InvalidArchive, InvalidArgument, NotFound, write_error

if TYPE_CHECKING:
    from ingot.export import report as export_report
    from ingot.model_store import Archive, Variant
    from ingot.quant.report import records as quant_report

    Record = export_report.Report | quant_report.Report | quant_report.ModelComparison

SUFFIXES = (".html", ".json", ".txt")
_EXPORT = "report.json"
_QUANTIZATION = "quantization.json"


def write(archive: Archive, path: Path, name: str | None = None) -> str:
    """Write an archive's report in the format of the file's suffix, and return the name of the variant that carries it.

    Only the report's data is read from the archive. The page and the text are rendered here: those in the archive could
    run scripts, or control a terminal.

    Args:
        archive: the archive.
        path: the file.
        name: the variant whose report is written; by default the first that carries one.

    Raises:
        InvalidArgument: the suffix is not one of :data:`SUFFIXES`.
        NotFound: no variant carries a report.
        InvalidArchive: the report is invalid or too large.
    """
    check_suffix(path)
    variant, report = _read(archive, name)
    save(path, report)
    return variant.name


def exported(archive: Archive) -> tuple[Variant, export_report.Report] | None:
    """Return the export report of an archive and the variant that carries it, or None.

    Raises:
        InvalidArchive: the report is invalid or too large.
    """
    from ingot.export.report import Report

    for variant in archive.variants:
        if isinstance(report := _document(variant, _EXPORT), Report):
            return variant, report
    return None


def check_suffix(path: Path) -> None:
    """Raise InvalidArgument if no report can be written as such a file."""
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"a report cannot be written as {path.name}; end its name in {', '.join(SUFFIXES)}")


def save(path: Path, record: Record) -> None:
    """Write a record in the format of the file's suffix. The file appears whole or not at all."""
    put(path, _show(record, path.suffix))


def put(path: Path, content: str) -> None:
    """Write a text file, which appears whole or not at all.

    Raises:
        InvalidArgument: it cannot be written.
        StorageFull: its disk is full.
    """
    from ingot.model_store.blobs.files import atomic_file

    try:
        with atomic_file(path) as stream:
            stream.write(content.encode())
    except OSError as error:
        raise write_error(f"cannot write {path}", error) from error


def _read(archive: Archive, name: str | None) -> tuple[Variant, export_report.Report | quant_report.Report]:
    for variant in archive.variants if name is None else (archive.variant(name),):
        for document in (_QUANTIZATION, _EXPORT):
            if (report := _document(variant, document)) is not None:
                return variant, report
    who = "the archive" if name is None else f"variant '{name}'"
    raise NotFound(
        f"{who} carries no {_EXPORT}; export the model again to add one, or quantize it for a quantization report"
    )


def _document(variant: Variant, document: str) -> export_report.Report | quant_report.Report | None:
    from ingot.export.report import MAX_BYTES, Report
    from ingot.model_store.format import manifest

    where = f"the {document} of variant '{variant.name}'"
    if _size(variant, document) > MAX_BYTES:
        raise InvalidArchive(f"{where} is larger than {MAX_BYTES >> 20} MiB, which Ingot never writes")
    raw = variant.document(document)
    if raw is None:
        return None
    if document == _QUANTIZATION:
        from ingot.quant.report.records import Report as QuantizationReport

        return manifest.decode(QuantizationReport, raw, where)
    return manifest.decode(Report, raw, where)


def _size(variant: Variant, document: str) -> int:
    """Return the size of the documents of that name in the manifest, which bounds their reading."""
    from ingot.model_store.format import manifest

    layers = [layer for layer in variant.manifest.layers if layer.annotations.get(manifest.FILEPATH) == document]
    return max((layer.size for layer in layers), default=0)


def _show(record: Record, suffix: str) -> str:
    if suffix == ".json":  # in ASCII, whose control characters JSON escapes
        return json.dumps(record.model_dump(mode="json"), indent=1)
    page = suffix == ".html"
    from ingot.export import report as exports

    if isinstance(record, exports.Report):
        from ingot.export.report import view as export_view

        return printable(export_view.html(record) if page else export_view.text(record))
    from ingot.quant.report import records as quants

    if isinstance(record, quants.Report):
        from ingot.quant.report import view as quant_view

        return printable(quant_view.html(record) if page else quant_view.text(record))
    from ingot.quant.report import comparison

    return printable(comparison.html(record) if page else comparison.text(record))
