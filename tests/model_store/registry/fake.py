"""A registry in memory, for behaviour that docker-registry lacks: tokens, referrers, and lies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

from ingot.model_store import Archive
from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import manifest
from tests.model_store.registry.proxy import Asked, Reply

Handler = Callable[[Asked], "Reply | None"]


class Fake:
    """Answers as a registry does. ``before`` are called first, and may answer in its place.

    Args:
        referrers: list what is attached to a manifest, with ``others`` among it.
    """

    def __init__(self, *, referrers: bool = False):
        self.before: list[Handler] = []
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.has_referrers = referrers
        self.others: list[dict[str, object]] = []

    def put(self, archive: Archive, tag: str) -> None:
        for descriptor in archive.descriptors():
            kept = self.manifests if "manifest" in descriptor.media_type or "index" in descriptor.media_type else None
            (self.blobs if kept is None else kept)[descriptor.digest] = read(archive.blobs, descriptor)
        self.manifests[tag] = self.manifests[archive.digest]

    def __call__(self, asked: Asked) -> Reply:
        for handler in self.before:
            if (reply := handler(asked)) is not None:
                return reply
        return self.honest(asked)

    def honest(self, asked: Asked) -> Reply:
        match = re.fullmatch(
            r"/v2/(?P<name>.+?)/(?P<kind>manifests|blobs|referrers|tags)/(?P<rest>[^?]*).*", asked.path
        )
        if match is None:
            return Reply(404)
        answer: Callable[[Asked, str], Reply] = getattr(self, f"_{match['kind']}")
        return answer(asked, match["rest"])

    def _manifests(self, asked: Asked, reference: str) -> Reply:
        if asked.method == "PUT":
            self.manifests[reference] = self.manifests[digest(asked.body)] = asked.body
            headers = {"Docker-Content-Digest": digest(asked.body)}
            subject = json.loads(asked.body).get("subject")
            if self.has_referrers and subject:
                headers["OCI-Subject"] = subject["digest"]
            return Reply(201, headers)
        if reference not in self.manifests:
            return Reply(404)
        content = self.manifests[reference]
        kind = json.loads(content).get("mediaType", manifest.INDEX)
        return Reply(200, {"Content-Type": kind, "Docker-Content-Digest": digest(content)}, content)

    def _blobs(self, asked: Asked, rest: str) -> Reply:
        if asked.method == "POST":
            return Reply(202, {"Location": f"{asked.path}1?state=a%2Fb"})
        if asked.method == "PUT":
            self.blobs[digest(asked.body)] = asked.body
            return Reply(201)
        return Reply(200, body=self.blobs[rest]) if rest in self.blobs else Reply(404)

    def _tags(self, asked: Asked, rest: str) -> Reply:
        return Reply(200, body=json.dumps({"tags": [tag for tag in self.manifests if ":" not in tag]}).encode())

    def _referrers(self, asked: Asked, subject: str) -> Reply:
        if not self.has_referrers:
            return Reply(404)
        entries = list(self.others)
        for content in {digest(content): content for content in self.manifests.values()}.values():
            document = json.loads(content)
            if document.get("subject", {}).get("digest") == subject:
                entry = {"mediaType": manifest.MANIFEST, "digest": digest(content), "size": len(content)}
                entries.append({**entry, "artifactType": document["artifactType"]})
        index = {"schemaVersion": 2, "mediaType": manifest.INDEX, "manifests": entries}
        return Reply(200, {"Content-Type": manifest.INDEX}, json.dumps(index).encode())


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
