"""Sigstore's client for Node.js, an independent implementation of the bundles of cosign 3 and OpenSSF Model Signing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ingot.model_store import BlobFolder, Reference
from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import attachments
from ingot.model_store.trust import cosign, oms
from tests.model_store.samples import archive
from tests.model_store.signers import KEY, OTHER, dump, encode
from tests.support import RequireTool

CLIENT = Path(__file__).parent / "sigstore_js"
MODEL = archive(b"one")
KEYS = {KEY.public.keyid: KEY.public}


class Client:
    """Runs the client in a folder that has both keys."""

    def __init__(self, node: str, folder: Path):
        self._node = node
        self.folder = folder
        for name, key in (("key", KEY), ("other", OTHER)):
            (folder / f"{name}.pem").write_bytes(key.pem())
            (folder / f"{name}.pub").write_bytes(key.public.pem)

    def __call__(self, action: str, key: str, content: bytes) -> subprocess.CompletedProcess[str]:
        (self.folder / "content").write_bytes(content)
        command = [self._node, str(CLIENT / "bundle.js"), action, key, "content"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def client(require_tool: RequireTool, tmp_path: Path) -> Client:
    node = require_tool("node")
    if not (CLIENT / "node_modules").is_dir():
        missing = "Sigstore's client for Node.js is not installed; make tools installs it"
        if os.environ.get("INGOT_REQUIRE_TOOLS") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    (tmp_path / "client").mkdir()
    return Client(node, tmp_path / "client")


def changed(bundle: bytes) -> bytes:
    document: dict[str, Any] = json.loads(bundle)
    document["dsseEnvelope"]["payload"] = encode(b'{"another": "statement"}')
    return dump(document)


def of_cosign(tmp_path: Path) -> bytes:
    signed = cosign.sign(MODEL, Reference("team/tiny"), KEY)
    (item,) = (item for item in signed.attached if item.artifact_type == attachments.BUNDLE)
    return read(signed.blobs, attachments.load(signed.blobs, item, MODEL.descriptor).layers[0])


def of_files(tmp_path: Path) -> bytes:
    MODEL.save(tmp_path / "tiny.ingot")
    return oms.sign(tmp_path / "tiny.ingot", KEY, out=tmp_path / "tiny.ingot.sig")


@pytest.mark.matrix
@pytest.mark.parametrize("make", [of_cosign, of_files], ids=["cosign", "oms"])
def test_it_verifies_our_bundles(make: Any, client: Client, tmp_path: Path) -> None:
    bundle = make(tmp_path)
    answer = client("verify", "key.pub", bundle)
    assert answer.returncode == 0, answer.stderr
    for key, content in (("other.pub", bundle), ("key.pub", changed(bundle))):
        refused = client("verify", key, content)
        assert (refused.returncode, refused.stderr) == (1, "signature verification failed\n")


def test_we_verify_its_own(client: Client) -> None:
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"digest": {"sha256": MODEL.descriptor.hex}}],
        "predicateType": cosign.SIGN_PREDICATE,
        "predicate": {},
    }
    answer = client("sign", "key.pem", dump(statement))
    assert answer.returncode == 0, answer.stderr
    for content, result in ((answer.stdout.encode(), "valid"), (changed(answer.stdout.encode()), "invalid")):
        scratch = BlobFolder.scratch()
        made = attachments.make_bundle(scratch, MODEL.descriptor, content, cosign.SIGN_PREDICATE)
        assert cosign.check(MODEL.with_attached(scratch, [made]), "tiny", KEYS).result == result
