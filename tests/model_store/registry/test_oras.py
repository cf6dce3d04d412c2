"""oras, by its Python library, reads pushed archives byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import manifest
from ingot.model_store.registry import Registry
from tests.model_store.samples import archive

MODEL = archive(b"for oras", (b"weights" * 100_000,))


def test_oras_fetches_every_manifest_and_layer(registry: str, tmp_path: Path) -> None:
    import oras.client  # which imports a grammar that takes seconds
    import oras.container

    Registry(registry).push(MODEL, "oras/tiny:1")
    host = registry.removeprefix("oci://")
    client = oras.client.OrasClient(hostname=host, insecure=True)
    index = client.get_manifest(oras.container.Container(f"{host}/oras/tiny:1"), [manifest.INDEX])
    assert [entry["digest"] for entry in index["manifests"]] == [item.descriptor.digest for item in MODEL.variants]
    for variant in MODEL.variants:
        named = oras.container.Container(f"{host}/oras/tiny@{variant.descriptor.digest}")
        document = client.get_manifest(named, [manifest.MANIFEST])
        assert [layer["digest"] for layer in document["layers"]] == [item.digest for item in variant.manifest.layers]
        for layer in variant.manifest.layers:
            path = Path(client.download_blob(f"{host}/oras/tiny:1", layer.digest, str(tmp_path / layer.hex)))
            assert hashlib.sha256(path.read_bytes()).hexdigest() == layer.hex
            assert path.read_bytes() == read(MODEL.blobs, layer)
