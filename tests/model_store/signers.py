"""Keys, and envelopes as an attacker, another tool or another version makes them."""

from __future__ import annotations

import base64
import json
from typing import Any

from ingot.model_store import Archive
from ingot.model_store.trust.dsse import PAYLOAD_TYPE, STATEMENT_TYPE, encoding
from ingot.model_store.trust.keys import PrivateKey
from ingot.model_store.trust.signing import PREDICATE_TYPE

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()


def encode(content: bytes) -> str:
    return base64.b64encode(content).decode()


def statement(archive: Archive, name: str = "tiny", **fields: Any) -> dict[str, Any]:
    """Return a right statement but for ``fields``."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": archive.descriptor.hex}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"created": "2026-01-02T03:04:05Z", "tool": "ingot-0.1.0"},
        **fields,
    }


def envelope(content: bytes, key: PrivateKey = KEY, kind: str = PAYLOAD_TYPE, **fields: Any) -> dict[str, Any]:
    """Return an envelope whose signature holds, but for ``fields``."""
    signature = {"keyid": key.public.keyid, "sig": encode(key.sign(encoding(content, kind)))}
    return {"payload": encode(content), "payloadType": kind, "signatures": [signature], **fields}


def dump(content: Any) -> bytes:
    return json.dumps(content).encode()
