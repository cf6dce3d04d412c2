"""The blobs of one repository of a registry: a source and a destination."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from io import BytesIO
from typing import BinaryIO, Final

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store.blobs.blobs import Blobs, damaged, read_document
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format import manifest
from ingot.model_store.registry.auth import DELETE, PUSH, Scope
from ingot.model_store.registry.client import Client, RegistryResponse, Request
from ingot.model_store.registry.download import open_download
from ingot.model_store.registry.upload import Upload

DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
# Accept all kinds: otherwise a registry may convert a manifest, which changes its digest.
KINDS = (manifest.INDEX, manifest.MANIFEST, DOCKER_LIST, DOCKER_MANIFEST)
ACCEPT = ", ".join(KINDS)
DIGEST_HEADER = "Docker-Content-Digest"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Error codes while another client uploads the blobs of the same manifest: the blobs are about to appear.
_RACES = ("DIGEST_INVALID", "MANIFEST_BLOB_UNKNOWN")
_REMEMBERED_BYTES = 16 << 20


class RegistryBlobs:
    """Blobs below ``https://host/v2/<name>/``. Manifests have separate URLs there, which callers do not see.

    Args:
        client: the registry.
        name: the repository.
        chunk_bytes: size of the requests that upload a blob; None sends each blob whole, which every registry supports.
        purpose: the operation, such as ``push``, for messages.
    """

    workers = 4  # each mostly waits for the network

    def __init__(self, client: Client, name: str, chunk_bytes: int | None = None, purpose: str = ""):
        self.client = client
        self.name = name
        self._purpose = purpose
        self.subjects: set[str] = set()
        """Manifests whose attachments the registry says it lists."""
        self._chunk_bytes = chunk_bytes
        self._documents: dict[str, bytes] = {}

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        """Open a blob at a byte. If a connection breaks while it is read, another one continues from there.

        Raises:
            InvalidArchive: the registry lacks the blob, or has one of another size.
            Unavailable: the registry cannot be reached.
        """
        if _is_manifest(descriptor):
            content = self._manifest(descriptor)
            return BytesIO(content[start:])
        url = self.client.url(f"{self.name}/blobs/{descriptor.digest}")
        return open_download(self.client, url, Scope(self.name), descriptor, start)

    def has(self, descriptor: Descriptor) -> bool:
        """Return whether the repository has a blob of this digest.

        Raises:
            InvalidArchive: it has another size there.
        """
        folder = "manifests" if _is_manifest(descriptor) else "blobs"
        url = self.client.url(f"{self.name}/{folder}/{descriptor.digest}")
        answer = self.client.call(
            Request("HEAD", url, Scope(self.name, purpose=self._purpose), headers={"Accept": ACCEPT}), allow=(404,)
        )
        if answer.status == 404:
            return False
        length = answer.headers.get("Content-Length", "")
        if length.isdecimal() and int(length) != descriptor.size:
            raise InvalidArchive(
                f"blob {descriptor.digest} has {length} bytes in {self.client.address}, "
                f"but its manifest says {descriptor.size}"
            )
        return True

    def copy(self, source: Blobs, descriptor: Descriptor, transfer: Transfer | None = None) -> None:
        """Copy a blob and check its digest. Existing blobs are skipped.

        A blob of another repository of the same registry is mounted, not transferred.

        Raises:
            InvalidArchive: the source lacks the blob, or its content is damaged.
            InvalidArgument: the registry refuses it.
            Unavailable: the registry cannot be reached.
        """
        transfer = transfer or Transfer()
        if self.has(descriptor):
            transfer.skip(descriptor.size)
        elif _is_manifest(descriptor):
            self.put_manifest(descriptor.digest, read_document(source, descriptor), descriptor.media_type)
            transfer.advance(descriptor.size)
        else:
            scope = Scope(self.name, PUSH, self._neighbour(source))
            upload = Upload(self.client, scope, source, descriptor, transfer=transfer, chunk_bytes=self._chunk_bytes)
            upload.run()

    def finish(self) -> None:
        """Do nothing: registries store blobs durably."""

    def get_manifest(self, reference: str) -> tuple[Descriptor, bytes] | None:
        """Return the manifest of a tag or digest, with its digest checked; None if there is none.

        Raises:
            InvalidArchive: its digest differs from the requested one, or from the registry's header.
        """
        answer = self.client.call(self._request("GET", reference, {"Accept": ACCEPT}), allow=(404,))
        if answer.status == 404:
            return None
        kind = media_type(answer)
        descriptor = Descriptor(media_type=kind[:255], digest=_digest(answer.content), size=len(answer.content))
        said = answer.headers.get(DIGEST_HEADER, "")
        for expected in (said, reference):
            if expected.startswith("sha256:") and expected != descriptor.digest:
                raise damaged(descriptor.model_copy(update={"digest": expected}))
        if sum(map(len, self._documents.values())) < _REMEMBERED_BYTES:
            self._documents[descriptor.digest] = answer.content
        return descriptor, answer.content

    def digest_of(self, tag: str) -> str | None:
        """Return the digest that a tag points to; None if there is no such tag."""
        answer = self.client.call(self._request("HEAD", tag, {"Accept": ACCEPT}), allow=(404,))
        if answer.status == 404:
            return None
        digest: str = answer.headers.get(DIGEST_HEADER, "")
        if _DIGEST.fullmatch(digest):
            return digest
        found = self.get_manifest(tag)
        return found[0].digest if found else None

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> None:
        """Store a manifest by its digest, or point a tag at it.

        Raises:
            InvalidArgument: the registry refuses it.
        """
        request = self._request("PUT", reference, {"Content-Type": media_type}, content)
        answer = self.client.call(replace(request, passing=_RACES))
        if subject := answer.headers.get("OCI-Subject"):
            self.subjects.add(subject)
        said = answer.headers.get(DIGEST_HEADER)
        if said is not None and said != _digest(content):
            raise InvalidArgument(
                f"{self.client.address} stored a manifest of '{self.name}' as {said[:80]}, which is not its digest"
            )

    def delete_manifest(self, reference: str, allow: tuple[int, ...] = ()) -> int:
        """Delete a tag, or all tags of a digest; return the status of the response."""
        return self.client.call(self._request("DELETE", reference, {}), allow).status

    def _neighbour(self, source: Blobs) -> str:
        """Return the repository name of a source in the same registry, or an empty string."""
        if isinstance(source, RegistryBlobs) and source.client.address == self.client.address:
            return source.name
        return ""

    def _manifest(self, descriptor: Descriptor) -> bytes:
        content = self._documents.get(descriptor.digest)
        if content is None:
            found = self.get_manifest(descriptor.digest)
            if found is None:
                raise InvalidArchive(f"blob {descriptor.digest} is missing in {self.client.address}/{self.name}")
            content = found[1]
        if len(content) != descriptor.size:
            raise InvalidArchive(
                f"blob {descriptor.digest} has {len(content)} bytes, but its manifest says {descriptor.size}"
            )
        return content

    def _request(self, method: str, reference: str, headers: dict[str, str], content: bytes | None = None) -> Request:
        actions = {"PUT": PUSH, "DELETE": DELETE}.get(method, "pull")
        url = self.client.url(f"{self.name}/manifests/{reference}")
        return Request(method, url, Scope(self.name, actions, purpose=self._purpose), headers=headers, content=content)


def media_type(answer: RegistryResponse) -> str:
    """Return the media type of a manifest.

    Static file servers and some proxies send ``application/octet-stream`` or nothing; then the manifest's own field
    counts, which is optional, so without it the fields that only one kind has.
    """
    sent: str = answer.headers.get("Content-Type", "").partition(";")[0].strip()
    if sent in KINDS:
        return sent
    try:
        document = json.loads(answer.content)
        own = document.get("mediaType", "")
        implied = manifest.INDEX if "manifests" in document else manifest.MANIFEST if "layers" in document else sent
    except (ValueError, AttributeError, TypeError, RecursionError):
        return sent
    return own if isinstance(own, str) and own else implied


def _is_manifest(descriptor: Descriptor) -> bool:
    return descriptor.media_type in (manifest.INDEX, manifest.MANIFEST)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
