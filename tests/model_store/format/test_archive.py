from __future__ import annotations

import gc
import json
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import IngotError, InvalidArchive, InvalidArgument, NotFound
from ingot.model_store import Archive, BlobFolder, Golden, add_variant
from ingot.model_store.format import manifest
from ingot.model_store.format.manifest import Index
from ingot.tensors import DType, Signature, TensorSpec
from tests.model_store.samples import GOLDEN, SIGNATURE, archive, serving
from tests.model_store.tars import members, rewritten
from tests.support import RequireTool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.ingot"
    archive().save(path)
    return path


class TestRoundTrip:
    def test_a_saved_archive_opens_as_it_was(self, path: Path) -> None:
        opened, original = Archive.open(path), archive()
        opened.verify()
        assert opened.digest == original.digest
        assert opened.name == "tiny"
        assert opened.signature == SIGNATURE
        assert [variant.name for variant in opened.variants] == ["int8", "fp32"]
        assert [variant.serving for variant in opened.variants] == [variant.serving for variant in original.variants]
        (golden,) = opened.variant("fp32").goldens()
        assert np.array_equal(golden.inputs["x"], GOLDEN.inputs["x"])

    def test_the_same_archive_is_written_as_the_same_file(self, path: Path, tmp_path: Path) -> None:
        archive().save(tmp_path / "again.ingot")
        Archive.open(path).save(tmp_path / "copied.ingot")
        assert path.read_bytes() == (tmp_path / "again.ingot").read_bytes() == (tmp_path / "copied.ingot").read_bytes()

    def test_an_archive_may_be_saved_over_itself(self, path: Path) -> None:
        before = path.read_bytes()
        Archive.open(path).save(path)
        assert path.read_bytes() == before

    def test_the_preferred_variant_is_the_first_and_others_go_by_name(self, path: Path) -> None:
        opened = Archive.open(path)
        assert opened.variant().name == "int8"
        assert opened.variant("fp32").name == "fp32"
        with pytest.raises(NotFound, match="has no variant 'bf16'; it has: int8, fp32"):
            opened.variant("bf16")

    def test_shared_blobs_are_there_once(self, path: Path) -> None:
        names = [info.name for info, _ in members(path)]
        assert len(names) == len(set(names))
        opened = Archive.open(path)
        assert opened.variants[0].weights == opened.variants[1].weights
        assert opened.size == sum(len(data) for info, data in members(path) if info.name.startswith("blobs/"))

    def test_a_variant_inside_a_file_has_no_path_until_it_is_unpacked(self, path: Path) -> None:
        opened = Archive.open(path)
        with pytest.raises(InvalidArgument, match="unpack the archive first"):
            opened.variant().path()
        unpacked = opened.unpacked()
        assert unpacked.digest == opened.digest
        assert unpacked.variant("fp32").path().read_bytes() == b"a graphfp32"
        assert unpacked.unpacked() is unpacked

    def test_a_temporary_folder_is_removed_with_its_last_user(self, path: Path) -> None:
        variant = Archive.open(path).unpacked().variant()
        folder = variant.path().parent
        gc.collect()
        assert folder.is_dir()
        del variant
        gc.collect()
        assert not folder.exists()

    def test_saving_leaves_nothing_behind_when_it_fails(self, tmp_path: Path) -> None:
        made = archive()
        with pytest.raises(InvalidArgument, match="cannot write"):
            made.save(tmp_path / "nowhere" / "a.ingot")
        (tmp_path / "folder").mkdir()
        with pytest.raises(InvalidArgument, match="cannot write"):
            made.save(tmp_path / "folder")
        assert made.variant().path().is_file()
        made.variant().path().unlink()
        with pytest.raises(InvalidArchive, match="is missing"):
            made.save(tmp_path / "a.ingot")
        assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


class TestDamage:
    def test_a_file_cut_anywhere_is_refused(self, path: Path) -> None:
        good = path.read_bytes()
        end = max(info.offset_data + info.size for info, _ in members(path))
        for length in [*range(0, end, 97), end - 1]:
            path.write_bytes(good[:length])
            with pytest.raises(InvalidArchive, match=r"tiny\.ingot"):
                Archive.open(path).verify()

    @pytest.mark.matrix
    def test_a_flipped_bit_is_found_or_changes_nothing(self, path: Path) -> None:
        """Padding between members and annotations in index.json do not matter; any other change must be found."""
        good, expected = path.read_bytes(), Archive.open(path)
        contents = [variant.serving for variant in expected.variants]
        inside = [
            info.offset_data + index
            for info, data in members(path)
            if info.name.startswith("blobs/")
            for index in range(len(data))
        ]
        chosen = random.Random(0)
        for position in chosen.sample(inside, 150):
            path.write_bytes(flipped(good, position, chosen.randrange(8)))
            with pytest.raises(InvalidArchive):
                Archive.open(path).verify()
        for position in chosen.sample(range(len(good)), 300):
            path.write_bytes(flipped(good, position, chosen.randrange(8)))
            try:
                opened = Archive.open(path)
                opened.verify()
            except InvalidArchive:
                continue
            assert opened.digest == expected.digest
            assert [variant.serving for variant in opened.variants] == contents

    def test_damage_in_a_weight_is_found_when_it_is_read(self, path: Path) -> None:
        good = path.read_bytes()
        path.write_bytes(flipped(good, good.index(b"some weights"), 0))
        opened = Archive.open(path)  # does not read the weights
        for use in (opened.verify, opened.unpacked):
            with pytest.raises(InvalidArchive, match=r"tiny\.ingot: blob sha256:\w+ .* is damaged"):
                use()

    @pytest.mark.parametrize("content", [b"", b"just some text\n" * 100, b"\x00" * 10240, b"PK\x03\x04" + b"x" * 600])
    def test_another_kind_of_file_is_refused(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(InvalidArchive, match="is not an Ingot archive"):
            Archive.open(path)

    def test_a_compressed_archive_is_refused(self, path: Path) -> None:
        subprocess.run(["gzip", path], check=True)
        path.with_suffix(".ingot.gz").rename(path)
        with pytest.raises(InvalidArchive, match="is not an Ingot archive"):
            Archive.open(path)

    def test_no_file_and_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="there is no file"):
            Archive.open(tmp_path / "nope.ingot")
        with pytest.raises(InvalidArgument, match="is a folder"):
            Archive.open(tmp_path)


def flipped(content: bytes, position: int, bit: int) -> bytes:
    return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]


class TestHostileDocuments:
    @pytest.mark.parametrize("needed", ["oci-layout", "index.json"])
    def test_a_missing_file_of_the_layout(self, path: Path, needed: str) -> None:
        rewritten(path, lambda content: content.pop(needed))
        with pytest.raises(InvalidArchive, match=f"it has no {needed}"):
            Archive.open(path)

    def test_any_missing_blob(self, path: Path) -> None:
        good = path.read_bytes()
        for info, _ in members(path):
            if info.name.startswith("blobs/"):
                path.write_bytes(good)
                rewritten(path, lambda content, name=info.name: content.pop(name))  # type: ignore[misc]
                with pytest.raises(InvalidArchive, match=r"tiny\.ingot: blob sha256:\w+ is missing"):
                    Archive.open(path).verify()

    def test_a_blob_of_another_size(self, path: Path) -> None:
        name = f"blobs/sha256/{Archive.open(path).variant().graph.hex}"
        rewritten(path, lambda content: content.update({name: content[name] + b"!"}))
        with pytest.raises(InvalidArchive, match="has 12 bytes, but its manifest says 11"):
            Archive.open(path).verify()

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (b"", "index.json is not valid"),
            (b"[]", "index.json is not valid"),
            (b'{"schemaVersion": 2, "manifests": []}', "holds 0 archives"),
            (b'{"schemaVersion": 1, "manifests": []}', "at 'schemaVersion'"),
            (b'{"schemaVersion": 2, "manifests": {}}', "at 'manifests'"),
            (b'{"manifests": [{"mediaType": "x", "digest": "sha256:../../etc/passwd", "size": 1}]}', "digest"),
            (b'{"manifests": [{"mediaType": "x", "digest": "sha256:%s", "size": -1}]}' % (b"0" * 64), "size"),
            (b'{"manifests": [{"mediaType": "x", "digest": "md5:%s", "size": 1}]}' % (b"0" * 32), "digest"),
            (
                b'{"manifests": [{"mediaType": "x", "digest": "sha256:%s", "size": 1}]}' % (b"0" * 64),
                "'x', not an index",
            ),
            (
                b'{"manifests": [{"mediaType": "%s", "digest": "sha256:%s", "size": 1}]}'
                % (manifest.INDEX.encode(), b"0" * 64),
                "is missing",
            ),
            (
                b'{"manifests": [{"mediaType": "x", "digest": "sha256:%s", "size": 1%s}]}' % (b"0" * 64, b"0" * 400),
                "size",
            ),
            (b'{"a": ' * 100_000, "index.json is not valid"),
            (b"[" * 100_000, "index.json is not valid"),
            (b" " * ((4 << 20) + 1), "larger than 4 MiB"),
        ],
    )
    def test_a_bad_index(self, path: Path, index: bytes, message: str) -> None:
        rewritten(path, lambda content: content.update({"index.json": index}))
        with pytest.raises(InvalidArchive, match=message):
            Archive.open(path)

    def test_two_archives_in_one_file(self, path: Path) -> None:
        def twice(content: dict[str, bytes]) -> None:
            index = json.loads(content["index.json"])
            index["manifests"] *= 2
            content["index.json"] = json.dumps(index).encode()

        rewritten(path, twice)
        with pytest.raises(InvalidArchive, match="holds 2 archives"):
            Archive.open(path)

    def test_a_document_that_claims_to_be_huge(self) -> None:
        blobs = BlobFolder.scratch()
        huge = blobs.put(b"{}", manifest.MANIFEST).model_copy(update={"size": 5 << 20})
        with pytest.raises(InvalidArchive, match="over the 4 MiB limit"):
            Archive.create(blobs, [huge])

    @pytest.mark.matrix
    def test_a_manifest_of_a_million_layers_is_not_even_read(self) -> None:
        blobs = BlobFolder.scratch()
        layer = {"mediaType": manifest.WEIGHT, "digest": f"sha256:{'0' * 64}", "size": 1}
        document = {"schemaVersion": 2, "mediaType": manifest.MANIFEST, "config": layer, "layers": [layer] * 1_000_000}
        made = blobs.put(json.dumps(document).encode(), manifest.MANIFEST)
        for claimed in (made.size, 4 << 20):  # and one that lies about its size
            entry = made.model_copy(update={"size": claimed})
            with pytest.raises(InvalidArchive, match=r"over the 4 MiB limit|has \d+ bytes, but its manifest says"):
                Archive.create(blobs, [entry])

    def test_a_manifest_of_something_else(self) -> None:
        """For example a container image, whose layers are not a model's."""
        blobs = BlobFolder.scratch()
        layer = blobs.put(b"layer", "application/vnd.oci.image.layer.v1.tar")
        image = {"schemaVersion": 2, "config": layer.model_dump(by_alias=True), "layers": []}
        with pytest.raises(InvalidArchive, match="not an Ingot variant"):
            Archive.create(blobs, [blobs.put(json.dumps(image).encode(), manifest.MANIFEST)])
        image["artifactType"] = "application/vnd.something.else"
        with pytest.raises(InvalidArchive, match="artifactType"):
            Archive.create(blobs, [blobs.put(json.dumps(image).encode(), manifest.MANIFEST)])

    def test_variants_must_be_named_once_and_agree(self) -> None:
        blobs = BlobFolder.scratch()
        other = Signature((TensorSpec("x", DType.FP64, ("batch", 3)),), SIGNATURE.outputs, "batch")
        graph = blobs.put(b"graph", manifest.WEIGHT)
        first = add_variant(blobs, serving(), graph, (), ())
        with pytest.raises(InvalidArchive, match="distinct"):
            Archive.create(blobs, [first, first])
        with pytest.raises(InvalidArchive, match="one or more"):
            Archive.create(blobs, [])
        for odd in (serving("other", "int8"), serving("tiny", "int8", other)):
            with pytest.raises(
                InvalidArchive, match="another name, signature or generation, or other steps, than 'fp32'"
            ):
                Archive.create(blobs, [first, add_variant(blobs, odd, graph, (), ())])


@pytest.mark.matrix
def test_any_garbled_archive_raises_a_deliberate_error(path: Path) -> None:
    """Overwrite, remove or double whole stretches: no other exception is raised."""
    good, chosen = path.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(150):
        start = chosen.randrange(len(good))
        end = min(len(good), start + chosen.choice((1, 16, 512, 3000)))
        middle = chosen.choice((b"", chosen.randbytes(end - start), good[start:end] * 2, b"9" * (end - start)))
        path.write_bytes(good[:start] + middle + good[end:])
        try:
            Archive.open(path).verify()
        except IngotError:
            refused += 1
    assert refused > 75


def test_skopeo_reads_and_copies_the_file(path: Path, tmp_path: Path, require_tool: RequireTool) -> None:
    """An archive is an ordinary OCI artifact: another program finds the same documents, bytes and digests in it."""
    skopeo = require_tool("skopeo")
    opened = Archive.open(path)
    raw = subprocess.run([skopeo, "inspect", "--raw", f"oci-archive:{path}"], check=True, capture_output=True).stdout
    assert manifest.decode(Index, raw, "skopeo's index").manifests == tuple(
        variant.descriptor for variant in opened.variants
    )
    copy = ["copy", "--all", "--insecure-policy", f"oci-archive:{path}", f"oci:{tmp_path / 'copy'}:tiny"]
    copied = subprocess.run([skopeo, *copy], capture_output=True, text=True)
    assert copied.returncode == 0, copied.stderr
    index = manifest.decode(Index, (tmp_path / "copy" / "index.json").read_bytes(), "the copy's index")
    assert index.manifests[0].digest == opened.digest
    again = Archive(BlobFolder(tmp_path / "copy" / "blobs"), index.manifests[0])
    again.verify()
    assert [variant.name for variant in again.variants] == ["int8", "fp32"]


def test_goldens_of_another_model_are_refused() -> None:
    blobs = BlobFolder.scratch()
    for case in (Golden({}, GOLDEN.outputs), Golden(GOLDEN.inputs, {}), Golden(GOLDEN.inputs, {"w": np.ones(1)})):
        graph = blobs.put(b"graph", manifest.WEIGHT)
        made = Archive.create(blobs, [add_variant(blobs, serving(), graph, (), [case])])
        with pytest.raises(InvalidArchive, match="the goldens do not match this model"):
            made.variant().goldens()
