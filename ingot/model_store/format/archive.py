"""An archive: one model with its variants, immutable, identified by its digest."""

from __future__ import annotations

import contextlib
import logging
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from ingot.errors import InvalidArchive, InvalidArgument, NotFound, write_error
from ingot.model_store.blobs.blobs import Blobs, BlobSink, CheckedReader, chunks, read_document
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.files import atomic_file
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.blobs.remote import ObjectFile, is_object
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format import attachments, manifest
from ingot.model_store.format.manifest import Index, Serving
from ingot.model_store.format.tar import LocalFile, TarBlobs
from ingot.model_store.format.variant import Variant, read_variant
from ingot.model_store.references import attachments_tag
from ingot.tensors import Signature

MAX_VARIANTS = 64

log = logging.getLogger(__name__)


class Archive:
    """An OCI index of variants, and the blobs that it refers to. An archive is never changed.

    Examples:
        >>> archive = ingot.Archive.open("net.ingot")
        >>> archive.name, [variant.name for variant in archive.variants]
        ('net', ['fp32'])
        >>> archive.verify()

    Args:
        blobs: the source of the blobs.
        descriptor: the archive's index, whose digest is the archive's identity.
        attached: the manifests of attachments, such as signatures, which are not part of its identity.

    Raises:
        InvalidArchive: a document is missing, damaged or invalid.
    """

    def __init__(self, blobs: Blobs, descriptor: Descriptor, attached: Iterable[Descriptor] = ()):
        self.blobs = blobs
        self.descriptor = descriptor
        self.attached = tuple(attached)
        if descriptor.media_type != manifest.INDEX:
            raise InvalidArchive(f"{descriptor.digest} has the type '{descriptor.media_type[:80]}', not an index")
        index = manifest.decode(Index, read_document(blobs, descriptor), "the archive's index")
        if (
            len({entry.digest for entry in index.manifests}) < len(index.manifests)
            or len(index.manifests) > MAX_VARIANTS
        ):
            raise InvalidArchive(f"the archive's variants must be distinct, and {MAX_VARIANTS} at most")
        self.variants = tuple(read_variant(blobs, entry) for entry in index.manifests)
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) < len(names):
            raise InvalidArchive(f"the archive's variants are {names}; there must be one or more, with distinct names")
        first = self.variants[0].serving
        for variant in self.variants[1:]:
            if _described(variant.serving) != _described(first):
                raise InvalidArchive(
                    f"variant '{variant.name}' has another name, signature or generation, or other steps, than "
                    f"'{first.variant}'"
                )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Archive:
        """Open an archive file without unpacking it.

        Args:
            path: the file, or a URL in object storage, such as ``s3://bucket/digits.ingot``.

        Raises:
            NotFound: there is no such file.
            InvalidArchive: it is not an archive, or the parts that are read here are damaged; :meth:`verify` reads all.
            Unavailable: the object storage cannot be reached.
        """
        if isinstance(path, str) and is_object(path):
            tar = TarBlobs(ObjectFile(path))
        else:
            tar = TarBlobs(LocalFile(Path(path)))
        manifest.decode(manifest.OCILayout, tar.document("oci-layout"), f"{tar.name}: oci-layout")
        index = manifest.decode(Index, tar.document("index.json"), f"{tar.name}: index.json")
        with _named(tar.name):
            first, *others = index.manifests or (None,)
            if first is None or len(others) > 1 or any(not _lists_attached(other, first) for other in others):
                raise InvalidArchive(f"it holds {len(index.manifests)} archives; an archive file holds one")
            return cls(tar, first, attachments.listed(tar, others[0]) if others else ())

    @classmethod
    def create(cls, blobs: BlobFolder, variants: Iterable[Descriptor]) -> Archive:
        """Create an archive of variants whose blobs are in ``blobs`` already; the first is the preferred one."""
        index = Index(manifests=tuple(variants))
        return cls(blobs, blobs.put(manifest.encode(index), manifest.INDEX))

    @property
    def name(self) -> str:
        """The model's name, in lower case."""
        return self.variants[0].serving.name

    @property
    def digest(self) -> str:
        """The archive's identity, ``sha256:...``."""
        return self.descriptor.digest

    @property
    def file(self) -> Path | None:
        """The archive file on disk that it was opened from; None if it is elsewhere."""
        return self.blobs.path if isinstance(self.blobs, TarBlobs) else None

    @property
    def signature(self) -> Signature:
        """The inputs and outputs, which all variants share."""
        return self.variants[0].signature

    @property
    def size(self) -> int:
        """The total bytes of all distinct blobs."""
        return sum(descriptor.size for descriptor in self._descriptors.values())

    @cached_property
    def _descriptors(self) -> dict[str, Descriptor]:
        return {descriptor.digest: descriptor for descriptor in self.descriptors()}

    def variant(self, name: str | None = None) -> Variant:
        """Return a variant by name, or the preferred one.

        Raises:
            NotFound: there is no variant of that name; the message lists the names.
        """
        if name is None:
            return self.variants[0]
        for variant in self.variants:
            if variant.name == name:
                return variant
        names = ", ".join(variant.name for variant in self.variants)
        raise NotFound(f"'{self.name}' has no variant '{name}'; it has: {names}")

    def descriptors(self) -> Iterator[Descriptor]:
        """Yield every blob of the archive; a document follows the blobs that it refers to."""
        for variant in self.variants:
            yield from variant.manifest.layers
            yield variant.manifest.config
            yield variant.descriptor
        yield self.descriptor

    def all_descriptors(self) -> Iterator[Descriptor]:
        """Yield every blob of the archive and of its attachments."""
        yield from self.descriptors()
        yield from self.attached_descriptors()

    def attached_descriptors(self) -> Iterator[Descriptor]:
        """Yield the blobs of the attachments; a document follows the blobs that it refers to."""
        for descriptor in self.attached:
            try:
                document = attachments.load(self.blobs, descriptor, self.descriptor)
            except InvalidArchive as error:  # anyone can attach something to an archive, which must not invalidate it
                log.warning("an attachment of %s is ignored: %s", self.digest, error)
                continue
            yield from (*document.layers, document.config, descriptor)

    def signatures(self) -> tuple[bytes, ...]:
        """Return the attached DSSE envelopes, unverified; :mod:`ingot.model_store.trust.signing` verifies them.

        Raises:
            InvalidArchive: one is damaged.
        """
        return tuple(attachments.contents(self.blobs, self.attached, self.descriptor))

    def with_signature(self, envelope: bytes, *, replace: bool = False) -> Archive:
        """Return this archive with a signature attached, to save it or for a place's ``attach``.

        Args:
            envelope: the signature.
            replace: drop the other signatures.

        Raises:
            InvalidArgument: it has the maximum number of signatures.
        """
        others = (item for item in self.attached if item.artifact_type != attachments.SIGNATURE)
        added = BlobFolder.scratch()
        descriptor = attachments.make(added, self.descriptor, envelope)
        return self.with_attached(added, [descriptor], instead=tuple(others) if replace else self.attached)

    def with_attached(
        self, added: BlobFolder, new: Sequence[Descriptor], instead: Sequence[Descriptor] | None = None
    ) -> Archive:
        """Return this archive with further attachments.

        Args:
            added: the blobs of the new attachments.
            new: their manifests.
            instead: the attachments to keep; all by default.

        Raises:
            InvalidArgument: it has the maximum number of attachments.
        """
        kept = self.attached if instead is None else instead
        if len(kept) + len(new) > attachments.MAX_ATTACHMENTS:
            raise InvalidArgument(
                f"the archive has the maximum of {len(kept)} signatures; ingot trust sign --replace drops them"
            )
        return Archive(_Overlay(added, self.blobs), self.descriptor, (*kept, *new))

    def verify(self) -> None:
        """Read every blob and check its digest; signatures are checked by :mod:`ingot.model_store.trust.policy`.

        Raises:
            InvalidArchive: one is missing or damaged.
        """
        with self._named():
            for descriptor in self._descriptors.values():
                for _ in chunks(self.blobs, descriptor):
                    pass

    def check_own(self) -> None:
        """Check that no variant's graph refers to blobs of others.

        In a store, where all blobs are in one folder, it could otherwise read another model's weights.

        Raises:
            InvalidArchive: a graph names a blob that its manifest does not list, or is damaged.
        """
        with self._named():
            for variant in self.variants:
                variant.check_own()

    def copy_to(self, sink: BlobSink, transfer: Transfer | None = None) -> Archive:
        """Copy every blob, checked on the way, and return the same archive in its new place.

        The manifest is copied last, so that every archive in the sink is complete. If the source is a file on disk,
        every blob is read, even if the sink has a copy: damage is always reported.

        Raises:
            InvalidArchive: a blob is missing or damaged.
        """
        transfer = transfer or Transfer()
        stages: tuple[dict[str, Descriptor], ...] = ({}, {})
        for descriptor in self.all_descriptors():
            refers = descriptor.media_type in (manifest.MANIFEST, manifest.INDEX)
            stages[refers][descriptor.digest] = descriptor
        transfer.expect(sum(item.size for stage in stages for item in stage.values()))
        content, referring = stages

        def copy(item: Descriptor) -> None:
            if not (isinstance(self.blobs, TarBlobs) and self.blobs.on_disk):
                sink.copy(self.blobs, item, transfer)
                return
            source = _Noting(self.blobs)
            with self._named():
                sink.copy(source, item, transfer)
                if not source.opened_at_start:
                    for _ in chunks(self.blobs, item):
                        transfer.check()

        # Largest first, so that no thread is left with a large one at the end.
        ordered = sorted(content.values(), key=lambda item: -item.size)
        transfer.each(copy, ordered, sink.workers)
        for descriptor in referring.values():
            copy(descriptor)
        sink.finish()
        return Archive(sink, self.descriptor, self.attached)

    def copy_attached(self, sink: BlobSink) -> None:
        """Copy the blobs of the attachments only."""
        for descriptor in self.attached_descriptors():
            sink.copy(self.blobs, descriptor)
        sink.finish()

    def unpacked(self) -> Archive:
        """Return this archive with its blobs as files, as engines need them; in a temporary folder if necessary."""
        if isinstance(self.blobs, BlobFolder):
            return self
        with self._named():
            return self.copy_to(BlobFolder.scratch())

    def save(self, path: str | os.PathLike[str], transfer: Transfer | None = None) -> None:
        """Write the archive as one file, an OCI layout in an uncompressed tar. The file is complete or absent.

        Raises:
            InvalidArgument: the folder does not exist or cannot be written.
            StorageFull: its disk is full.
            InvalidArchive: a blob is missing or damaged.
        """
        path = Path(path)
        blobs, entries = self.blobs, [_named_entry(self.descriptor, self.name)]
        descriptors = {**self._descriptors, **{item.digest: item for item in self.attached_descriptors()}}
        if self.attached:
            added = BlobFolder.scratch()
            listing = added.put(manifest.encode(Index(manifests=self.attached)), manifest.INDEX)
            blobs, descriptors[listing.digest] = _Overlay(added, blobs), listing
            entries.append(_named_entry(listing, attachments_tag(self.digest)))
        index = manifest.encode(Index(manifests=tuple(entries)))
        transfer = transfer or Transfer()
        transfer.expect(sum(item.size for item in descriptors.values()))
        try:
            with atomic_file(path) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
                _add(tar, "oci-layout", len(manifest.LAYOUT), BytesIO(manifest.LAYOUT))
                _add(tar, "index.json", len(index), BytesIO(index))
                for descriptor in descriptors.values():
                    with CheckedReader(blobs, descriptor, transfer) as blob:
                        _add(tar, f"blobs/sha256/{descriptor.hex}", descriptor.size, blob)
        except OSError as error:
            raise write_error(f"cannot write {path}", error) from error

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return _named(self.blobs.name) if isinstance(self.blobs, TarBlobs) else contextlib.nullcontext()

    def __repr__(self) -> str:
        return f"Archive({self.name!r}, {[variant.name for variant in self.variants]}, {self.digest[:19]})"


class _Noting:
    """A source that records whether a blob was read from its beginning."""

    def __init__(self, source: Blobs):
        self._source = source
        self.opened_at_start = False

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        self.opened_at_start |= start == 0
        return self._source.open(descriptor, start)


class _Overlay:
    """Blobs of one folder with priority over those of another source."""

    def __init__(self, folder: BlobFolder, behind: Blobs):
        self._folder = folder
        self._behind = behind

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        return (self._folder if self._folder.has(descriptor) else self._behind).open(descriptor, start)


def _described(serving: Serving) -> tuple[object, ...]:
    """Return the properties that all variants of an archive share."""
    return serving.name, serving.signature, serving.steps, serving.generation


def _lists_attached(entry: Descriptor, archive: Descriptor) -> bool:
    return entry.annotations.get(manifest.REF_NAME) == attachments_tag(archive.digest)


def _named_entry(descriptor: Descriptor, name: str) -> Descriptor:
    return descriptor.model_copy(update={"annotations": {manifest.REF_NAME: name}})


def _add(tar: tarfile.TarFile, name: str, size: int, content: BinaryIO | CheckedReader) -> None:
    # Fixed owner, mode and time: the same archive always produces the same file.
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    tar.addfile(info, content)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the name of the archive file."""
    try:
        yield
    except InvalidArchive as error:
        if name in str(error):
            raise
        raise InvalidArchive(f"{name}: {error}") from error
