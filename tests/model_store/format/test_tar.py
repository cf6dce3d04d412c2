"""Archive files made to deceive: only plain members with the names of a layout are accepted."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive
from ingot.model_store import Archive
from ingot.model_store.format import tar
from tests.model_store.samples import archive
from tests.model_store.tars import Member, member, members, write
from tests.support import RunIngot, refused

BLOB = "blobs/sha256/" + "0" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.ingot"
    archive().save(path)
    return path


def number(value: int) -> bytes:
    """Return a size in the binary form of GNU tar."""
    return (b"\xff" if value < 0 else b"\x80") + (value % (1 << 88)).to_bytes(11)


def extended(records: bytes, kind: bytes = b"x") -> bytes:
    """Return an extended header of records."""
    info, _ = member("PaxHeaders", records, kind)
    return info.tobuf() + records + bytes(-len(records) % 512)


class TestHostileTar:
    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (member("../outside", b"x"), "'../outside', which is not part"),
            (member("/etc/passwd", b"x"), "'/etc/passwd', which is not part"),
            (member("blobs/sha256/../../../outside", b"x"), "not part of an archive"),
            (member("blobs/sha256/" + "0" * 63, b"x"), "not part of an archive"),
            (member("blobs/sha256/" + "A" * 64, b"x"), "not part of an archive"),
            (member("README", b"x"), "'README', which is not part"),
            (member(BLOB, kind=tarfile.SYMTYPE, linkname="/etc/passwd"), "link or special file"),
            (member(BLOB, kind=tarfile.LNKTYPE, linkname="index.json"), "link or special file"),
            (member(BLOB, kind=tarfile.CHRTYPE), "link or special file"),
            (member(BLOB, kind=tarfile.FIFOTYPE), "link or special file"),
            (member(BLOB, kind=tarfile.CONTTYPE), "link or special file"),
            (member("blobs/sha256/x", kind=tarfile.DIRTYPE), "not part of an archive"),
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

    @pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
    def test_extension_headers_of_gigabytes_are_not_read(self, path: Path, run_ingot: RunIngot, kind: bytes) -> None:
        """The file is sparse, so it costs its sender no disk space."""
        size = 3 << 30
        info, _ = member("index.json", kind=kind)
        info.size = size
        with path.open("r+b") as stream:
            content = stream.read()
            stream.seek(0)
            stream.write(info.tobuf(tarfile.GNU_FORMAT))
            stream.seek(size, os.SEEK_CUR)
            stream.write(content)
        message = refused(run_ingot("copy", path, "tiny:1"))
        assert "tiny.ingot has a member with headers of more than 1 MiB" in message

    @pytest.mark.parametrize("kind", [b"x", b"g", b"X"])
    @pytest.mark.parametrize(
        ("records", "message"),
        [
            (b"5 a=\n" * 257, "'index.json', whose headers have too many records"),
            (b"5 a=\n" * 200_000, "'index.json', whose headers have too many records"),
            (b"2 " * 500_000 + b"a=", "'index.json', whose headers have a damaged record"),
            (b"9" * 1_000_000, "'index.json', whose headers have a damaged record"),
            (b"1000010 path=" + b"1" * 999_996 + b"\n", "'index.json', whose headers have a number of over 64 digits"),
        ],
        ids=["many", "one MiB of many", "overlapping", "no blank", "a long number"],
    )
    def test_records_that_take_long_to_read_are_refused(
        self, path: Path, kind: bytes, records: bytes, message: str
    ) -> None:
        path.write_bytes(extended(records, kind) + member("index.json")[0].tobuf() + path.read_bytes())
        with pytest.raises(InvalidArchive, match=message):
            Archive.open(path)

    def test_records_of_all_members_are_bounded_together(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tar, "_MAX_ALL_RECORDS", 500)
        one = extended(b"5 a=\n" * 250) + member("blobs", kind=tarfile.DIRTYPE)[0].tobuf()
        path.write_bytes(one * 2 + path.read_bytes())
        Archive.open(path)
        path.write_bytes(one + path.read_bytes())
        with pytest.raises(InvalidArchive, match=r"'blobs/', whose headers have too many .* 500 in the whole file"):
            Archive.open(path)

    def test_attributes_that_packers_write_are_passed_over(self, path: Path) -> None:
        content = members(path)
        for info, _ in content:
            info.pax_headers = {"path": info.name, "mtime": "1.5", "SCHILY.xattr.user.x": "1" * 5000, "comment": "é=\n"}
        write(path, content, tarfile.PAX_FORMAT)
        Archive.open(path).verify()

    @pytest.mark.parametrize("kind", [b"x", b"g"])
    def test_many_extension_headers_are_bounded_together(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, kind: bytes
    ) -> None:
        monkeypatch.setattr(tar, "_MAX_HEADERS_BYTES", 1 << 20)
        headers, _ = member("x", kind=kind)
        headers.size = 300_000
        folder, _ = member("blobs", kind=tarfile.DIRTYPE)
        one = headers.tobuf(tarfile.GNU_FORMAT) + bytes(300_032) + folder.tobuf(tarfile.GNU_FORMAT)
        path.write_bytes(one * 2 + path.read_bytes())
        Archive.open(path)
        path.write_bytes(one * 2 + path.read_bytes())
        with pytest.raises(InvalidArchive, match="have more than 1 MiB together"):
            Archive.open(path)
