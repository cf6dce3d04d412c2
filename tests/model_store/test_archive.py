from __future__ import annotations

import gc
import io
import json
import math
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import IngotError, InvalidArchive, InvalidArgument, NotFound
from ingot.model_store import Archive, BlobFolder, Golden, add_variant, manifest
from ingot.model_store.blobs import read
from ingot.model_store.manifest import Index
from ingot.tensors import DType, Signature, TensorSpec
from tests.model_store.samples import GOLDEN, SIGNATURE, archive, serving
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

    def test_the_same_archive_gives_the_same_file(self, path: Path, tmp_path: Path) -> None:
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

    def test_a_temporary_folder_goes_with_its_last_user(self, path: Path) -> None:
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

    def test_a_flipped_bit_is_found_or_changes_nothing(self, path: Path) -> None:
        """Between the members lies padding, and index.json has notes that identify nothing; all else must be found."""
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
    def test_another_kind_of_file_is_no_archive(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(InvalidArchive, match="is not an Ingot archive"):
            Archive.open(path)

    def test_a_compressed_archive_is_none(self, path: Path) -> None:
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


Member = tuple[tarfile.TarInfo, bytes]


def members(path: Path) -> list[Member]:
    with tarfile.open(path) as tar:
        return [(member, stream.read() if (stream := tar.extractfile(member)) else b"") for member in tar]


def write(path: Path, content: list[Member], form: int = tarfile.GNU_FORMAT) -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for member, data in content:
            tar.addfile(member, io.BytesIO(data))


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


BLOB = "blobs/sha256/" + "0" * 64


class TestHostileTar:
    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (member("../outside", b"x"), "'../outside', which is no part"),
            (member("/etc/passwd", b"x"), "'/etc/passwd', which is no part"),
            (member("blobs/sha256/../../../outside", b"x"), "no part of an archive"),
            (member("blobs/sha256/" + "0" * 63, b"x"), "no part of an archive"),
            (member("blobs/sha256/" + "A" * 64, b"x"), "no part of an archive"),
            (member("README", b"x"), "'README', which is no part"),
            (member(BLOB, kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "link or special file"),
            (member(BLOB, kind=tarfile.LNKTYPE, linkname="index.json"), "link or special file"),
            (member(BLOB, kind=tarfile.CHRTYPE), "link or special file"),
            (member(BLOB, kind=tarfile.FIFOTYPE), "link or special file"),
            (member(BLOB, kind=tarfile.CONTTYPE), "link or special file"),
            (member("blobs/sha256/x", kind=tarfile.DIRTYPE), "no part of an archive"),
            (member("index.json", b"{}"), "'index.json' twice"),
            (member("./index.json", b"{}"), "'index.json' twice"),
            (member("oci-layout", b"{}"), "'oci-layout' twice"),
        ],
    )
    def test_only_plain_files_of_the_layout_are_taken(self, path: Path, extra: Member, message: str) -> None:
        write(path, [*members(path), extra])
        with pytest.raises(InvalidArchive, match=message):
            Archive.open(path)

    def test_sparse_files_are_refused(self, path: Path) -> None:
        sparse = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.map": "0,1",
            "GNU.sparse.size": "9999999",
        }
        write(path, [*members(path), member(BLOB, b"x", pax_headers=sparse)], tarfile.PAX_FORMAT)
        with pytest.raises(InvalidArchive, match="link or special file"):
            Archive.open(path)

    def test_folders_and_dots_are_harmless(self, path: Path) -> None:
        """As ``tar -cf file .`` in an unpacked layout writes them."""
        content = members(path)
        for info, _ in content:
            info.name = f"./{info.name}"
        folders = [member(name, kind=tarfile.DIRTYPE) for name in (".", "./blobs", "./blobs/sha256")]
        write(path, [*folders, *content])
        Archive.open(path).verify()

    @pytest.mark.parametrize("kind", [b"0", b"5", b"x", b"g", b"L", b"K", b"S"])
    @pytest.mark.parametrize("size", [-512, -1, 1 << 40, 1 << 62, 1 << 80])
    def test_lying_sizes_are_refused(self, path: Path, kind: bytes, size: int) -> None:
        header = bytearray(member("index.json", kind=kind)[0].tobuf(tarfile.GNU_FORMAT))
        header[124:136] = number(size)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        path.write_bytes(bytes(header) + b"\0" * 10240)
        with pytest.raises(InvalidArchive):
            Archive.open(path)

    @pytest.mark.parametrize("kind", [b"x", b"L"])
    def test_a_long_chain_of_extension_headers_is_refused(self, path: Path, kind: bytes) -> None:
        path.write_bytes(member("x", kind=kind)[0].tobuf(tarfile.GNU_FORMAT) * 5000 + b"\0" * 10240)
        with pytest.raises(InvalidArchive):
            Archive.open(path)


def number(value: int) -> bytes:
    """Return a size in the binary form of GNU tar."""
    return (b"\xff" if value < 0 else b"\x80") + (value % (1 << 88)).to_bytes(11)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Change the members of an archive file by name."""
    content = {info.name: data for info, data in members(path)}
    change(content)
    write(path, [member(name, data) for name, data in content.items()])


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
        with pytest.raises(InvalidArchive, match="has 12 bytes, its manifest says 11"):
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

    def test_a_manifest_of_a_million_layers_is_not_even_read(self) -> None:
        blobs = BlobFolder.scratch()
        layer = {"mediaType": manifest.WEIGHT, "digest": f"sha256:{'0' * 64}", "size": 1}
        document = {"schemaVersion": 2, "mediaType": manifest.MANIFEST, "config": layer, "layers": [layer] * 1_000_000}
        made = blobs.put(json.dumps(document).encode(), manifest.MANIFEST)
        for claimed in (made.size, 4 << 20):  # and one that lies about its size
            entry = made.model_copy(update={"size": claimed})
            with pytest.raises(InvalidArchive, match=r"over the 4 MiB limit|has \d+ bytes, its manifest says"):
                Archive.create(blobs, [entry])

    def test_a_manifest_of_something_else(self) -> None:
        """Such as a container image: its layers are not a model's."""
        blobs = BlobFolder.scratch()
        layer = blobs.put(b"layer", "application/vnd.oci.image.layer.v1.tar")
        image = {"schemaVersion": 2, "config": layer.model_dump(by_alias=True), "layers": []}
        with pytest.raises(InvalidArchive, match="no variant of Ingot's"):
            Archive.create(blobs, [blobs.put(json.dumps(image).encode(), manifest.MANIFEST)])
        image["artifactType"] = "application/vnd.something.else"
        with pytest.raises(InvalidArchive, match="artifactType"):
            Archive.create(blobs, [blobs.put(json.dumps(image).encode(), manifest.MANIFEST)])

    def test_variants_must_be_named_once_and_agree(self) -> None:
        blobs = BlobFolder.scratch()
        other = Signature((TensorSpec("x", DType.FP64, ("batch", 3)),), SIGNATURE.outputs, "batch")
        graph = blobs.put(b"graph", manifest.WEIGHT)
        first = add_variant(blobs, serving(), graph, (), ())
        with pytest.raises(InvalidArchive, match="each named once"):
            Archive.create(blobs, [first, first])
        with pytest.raises(InvalidArchive, match="one or more"):
            Archive.create(blobs, [])
        for odd in (serving("other", "int8"), serving("tiny", "int8", other)):
            with pytest.raises(InvalidArchive, match="another name or signature than 'fp32'"):
                Archive.create(blobs, [first, add_variant(blobs, odd, graph, (), ())])

    @pytest.mark.parametrize(
        ("change", "where"),
        [
            ({"schema_version": 2}, "schema_version"),
            ({"format": "pickle"}, "format"),
            ({"variant": "../x"}, "variant"),
            ({"golden_tolerance": -1}, "golden_tolerance"),
            ({"signature": None}, "signature"),
            (
                {"signature": {"inputs": [{"name": "x", "dtype": "FP99", "shape": []}], "outputs": []}},
                "signature.inputs.0.dtype",
            ),
            (
                {"signature": {"inputs": [{"name": "x", "dtype": "FP32", "shape": [1.5]}], "outputs": []}},
                "signature.inputs.0.shape",
            ),
            ({"parents": ["../x"]}, "parents"),
        ],
    )
    def test_a_bad_serving_document(self, change: dict[str, object], where: str) -> None:
        raw = json.dumps({**serving().model_dump(mode="json"), **change}).encode()
        with pytest.raises(InvalidArchive, match=rf"serving\.json is not valid at '{where}"):
            manifest.decode(manifest.Serving, raw, "serving.json")

    def test_unknown_fields_of_the_same_version_are_ignored(self) -> None:
        raw = json.dumps({**serving().model_dump(mode="json"), "later": {"field": 1}}).encode()
        assert manifest.decode(manifest.Serving, raw, "serving.json") == serving()

    def test_a_document_is_encoded_the_same_each_time(self) -> None:
        assert manifest.encode(serving()) == manifest.encode(serving())
        assert manifest.decode(manifest.Serving, manifest.encode(serving()), "x") == serving()


def test_any_garbled_archive_gives_a_deliberate_error(path: Path) -> None:
    """Whole stretches overwritten, removed or doubled: whatever happens, no other exception comes out."""
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


# Fields of https://github.com/modelpack/model-spec/blob/main/schema/config-schema.json, each object of which has
# additionalProperties: false.
MODEL_PACK = {
    "descriptor": {
        "createdAt", "authors", "family", "name", "docURL", "sourceURL", "datasetsURL", "version", "revision", "vendor",
        "licenses", "title", "description",
    },
    "config": {"architecture", "format", "paramSize", "precision", "quantization", "capabilities"},
    "modelfs": {"type", "diffIds"},
}  # fmt: skip


def test_the_configuration_keeps_to_the_schema_of_model_pack() -> None:
    for variant in archive().variants:
        config = json.loads(read(variant.blobs, variant.manifest.config))
        assert set(config) == set(MODEL_PACK)
        for part, allowed in MODEL_PACK.items():
            assert set(config[part]) <= allowed
        assert config["modelfs"]["type"] == "layers"
        assert config["modelfs"]["diffIds"] == [layer.digest for layer in variant.manifest.layers]
        assert config["descriptor"]["createdAt"] == "2026-01-02T03:04:05Z"
        assert config["config"].get("quantization") == ("static-int8" if variant.name == "int8" else None)
        assert variant.manifest.config.media_type == "application/vnd.cncf.model.config.v1+json"
        assert all(layer.annotations or layer.media_type == manifest.WEIGHT for layer in variant.manifest.layers)


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


INTERVAL = {"value": 0.9, "low": 0.8, "high": 1.0}
METRIC = {"name": "top1", "before": INTERVAL, "after": INTERVAL, "drop": INTERVAL, "budget": 0.1, "rows": 5}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "../../x"}, "cannot name a model"),
        ({"name": "\x1b]0;pwned"}, "cannot name a model"),
        ({"features": ["states"]}, "newer Ingot, for: states"),
        ({"golden_tolerance": 1e30}, "golden_tolerance"),
        ({"signature": {"inputs": [], "outputs": [], "batch": "batch"}}, "batch dimension"),
        *(
            ({"evidence": {part: [{"rows": 1, "seconds": seconds}]}}, rf"evidence\.{part}\.0\.seconds")
            for part in ("latency", "baseline")
            for seconds in (0, 1e-320, 1e300, -1, math.nan, math.inf)
        ),
        ({"evidence": {"latency": [{"rows": -1, "seconds": 1}]}}, r"evidence\.latency\.0\.rows"),
        ({"evidence": {"agreement": [{"tensor": "y", "cosine": math.nan, "error": 0}]}}, "finite numbers"),
        ({"evidence": {"agreement": [{"tensor": "y", "cosine": 1, "error": 0, "sqnr": math.inf}]}}, "finite numbers"),
        ({"evidence": {"metric": METRIC | {"rows": -1}}}, r"evidence\.metric\.rows"),
        ({"evidence": {"metric": METRIC | {"budget": math.nan}}}, r"evidence\.metric\.budget"),
        ({"evidence": {"metric": METRIC | {"drop": INTERVAL | {"low": -1e300}}}}, r"evidence\.metric\.drop\.low"),
    ],
)
def test_a_serving_json_that_makes_no_sense(change: dict[str, Any], says: str) -> None:
    raw = json.dumps({**serving().model_dump(mode="json"), **change}).encode()
    with pytest.raises(InvalidArchive, match=says):
        manifest.decode(manifest.Serving, raw, "serving.json")


def test_goldens_of_another_model_are_refused() -> None:
    blobs = BlobFolder.scratch()
    for case in (Golden({}, GOLDEN.outputs), Golden(GOLDEN.inputs, {}), Golden(GOLDEN.inputs, {"w": np.ones(1)})):
        graph = blobs.put(b"graph", manifest.WEIGHT)
        made = Archive.create(blobs, [add_variant(blobs, serving(), graph, (), [case])])
        with pytest.raises(InvalidArchive, match="no cases of this model"):
            made.variant().goldens()
