"""Hostile and damaged zip and tar files: each fails with a specific error and leaves nothing behind."""

from __future__ import annotations

import copy
import gzip
import os
import random
import stat
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest

from ingot.errors import IngotError, InvalidArgument
from ingot.importing.members import FolderMembers, Limits
from tests.importing.sources import SCRIPT, manifest, read, script_mar, tgz, torch_file

HOSTILE_NAMES = ["../a", "a/../../b", "/etc/a", "a\\..\\b", "C:a", "a//b", "./", "a/./b", "a\nb", "\x1b[2J", "a" * 1001]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test here leaves the folder for temporary files empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.mar"


def refused(path: Path, message: str, limits: Limits | None = None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        read(path, limits=limits or Limits())
    assert list(Path(tempfile.gettempdir()).iterdir()) == []


def add(path: Path, info: zipfile.ZipInfo, content: bytes = b"x") -> None:
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(info, content)


class TestZip:
    @pytest.mark.parametrize("name", [name for name in HOSTILE_NAMES if name != "./"])
    def test_a_name_that_leads_elsewhere(self, path: Path, name: str) -> None:
        refused(script_mar(path, {name: b"x"}), "holds a file called .*, which is not a valid relative path")

    def test_a_name_with_more_behind_its_end(self, path: Path) -> None:
        script_mar(path, {"abcdef": b"x"})
        path.write_bytes(path.read_bytes().replace(b"abcdef", b"abc\0ef"))
        refused(path, "which is not a valid name")

    @pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
    def test_links_and_special_files(self, path: Path, kind: int) -> None:
        info = zipfile.ZipInfo("a.txt")
        info.create_system, info.external_attr = 3, (kind | 0o777) << 16
        add(script_mar(path), info, b"/etc/passwd")
        refused(path, "holds 'a.txt' as a link or special file")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_a_name_twice(self, path: Path) -> None:
        add(script_mar(path), zipfile.ZipInfo("net.pt"))
        refused(path, r"holds 'net.pt' twice")

    def test_members_that_share_their_bytes(self, path: Path) -> None:
        script_mar(path)
        with zipfile.ZipFile(path, "a") as file:
            other = copy.copy(file.getinfo("net.pt"))
            other.filename = "copy.pt"
            file.filelist.append(other)
            file.NameToInfo["copy.pt"] = other
            file.writestr("last.txt", b"")
        refused(path, "overlaps another file: it is malicious")

    def test_a_password(self, path: Path) -> None:
        script_mar(path)
        with zipfile.ZipFile(path, "a") as file:
            file.getinfo("net.pt").flag_bits |= 1
            file.writestr("last.txt", b"")
        refused(path, r"'net.pt' in .* is encrypted; pack it without a password")

    def test_another_compression(self, path: Path) -> None:
        info = zipfile.ZipInfo("a.txt")
        info.compress_type = zipfile.ZIP_LZMA
        add(script_mar(path), info)
        refused(path, "packed by method 14; pack it by deflate")

    def test_every_truncation(self, path: Path) -> None:
        whole = script_mar(path).read_bytes()
        for length in range(2, len(whole), 7):
            path.write_bytes(whole[:length])
            refused(path, "is damaged or truncated")

    def test_more_than_could_be_a_model(self, path: Path) -> None:
        limits = Limits(total=1 << 40, ratio=100, free=1 << 20)
        refused(script_mar(path, {"net.pt": bytes(8 << 20)}), "unpacks to more than 1048576 bytes", limits)
        refused(script_mar(path, {"net.pt": os.urandom(4000)}), "unpacks to more than 1000 bytes", Limits(total=1000))

    def test_files_in_any_number(self, path: Path) -> None:
        refused(script_mar(path, {f"{index}.txt": b"" for index in range(9)}), "over 10 files", Limits(members=10))

    def test_a_directory_that_would_fill_the_memory(self, path: Path) -> None:
        script_mar(path)
        with zipfile.ZipFile(path, "a") as file:
            for index in range(80):
                info = zipfile.ZipInfo(f"{index}.txt")
                info.comment = b"x" * 60_000
                file.writestr(info, b"")
        refused(path, "its list of files is longer than 4 MiB")

    def test_sizes_of_headers_are_not_believed(self, path: Path) -> None:
        script_mar(path, {"a.txt": b"y" * 5000})
        with zipfile.ZipFile(path, "a") as file:
            file.getinfo("a.txt").file_size = 5
            file.writestr("last.txt", b"")
        refused(path, r"is damaged: 'a.txt' cannot be read: Bad CRC-32")

    def test_damaged_content(self, path: Path) -> None:
        content = script_mar(path, {"a.txt": b"y" * 5000}).read_bytes()
        with zipfile.ZipFile(path) as file:
            start = file.getinfo("a.txt").header_offset + 30 + len("a.txt")
        path.write_bytes(content[:start] + b"\xff\xff" + content[start + 2 :])
        refused(path, r"is damaged: 'a.txt' cannot be read")

    @pytest.mark.matrix
    def test_flipped_bytes_are_errors_or_change_nothing(self, path: Path) -> None:
        whole = script_mar(path, {"index.json": b"{}"}, modelVersion="1").read_bytes()
        rng = random.Random(0)
        for _ in range(500):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged)
            try:
                read(path)
            except IngotError:
                continue


def test_folders_in_any_number(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    for index in range(21):
        (folder / str(index)).mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="over 20 entries"):
        FolderMembers(folder, Limits(members=10))


class TestTar:
    FILES: ClassVar = {
        "net/MAR-INF/MANIFEST.json": manifest(modelName="net", serializedFile="net.pt"),
        "net/net.pt": torch_file(*SCRIPT),
    }

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    def test_a_name_that_leads_elsewhere(self, path: Path, name: str) -> None:
        # The standard library strips a trailing slash, which leaves a dangling name.
        refused(tgz(path, {**self.FILES, name: b"x"}), "holds a file called .*, which is not a valid relative path")

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
    )
    def test_links_and_special_files(self, path: Path, kind: bytes) -> None:
        info = tarfile.TarInfo("net/a.txt")
        info.type, info.linkname = kind, "/etc/passwd"
        refused(tgz(path, self.FILES, info), "holds 'net/a.txt' as a link, sparse or special file")

    def test_sparse_files(self, path: Path) -> None:
        info = tarfile.TarInfo("net/a.txt")
        info.size, info.pax_headers = 1, {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40)}
        refused(tgz(path, self.FILES, info), "holds 'net/a.txt' as a link, sparse or special file")

    def test_a_name_twice(self, path: Path) -> None:
        refused(tgz(path, self.FILES, tarfile.TarInfo("net/net.pt")), r"holds 'net/net.pt' twice")

    def test_more_than_could_be_a_model(self, path: Path) -> None:
        path.write_bytes(gzip.compress(bytes(8 << 20)))
        refused(path, "unpacks to more than 1048576 bytes", Limits(ratio=100, free=1 << 20))

    def test_files_in_any_number(self, path: Path) -> None:
        many = {f"net/{index}.txt": b"" for index in range(9)}
        refused(tgz(path, {**self.FILES, **many}), "over 10 files", Limits(members=10))
        folders = [tarfile.TarInfo(f"{index}") for index in range(20)]
        for info in folders:
            info.type = tarfile.DIRTYPE
        refused(tgz(path, self.FILES, *folders), "over 20 entries", Limits(members=10))

    def test_a_header_that_would_fill_the_memory(self, path: Path) -> None:
        info = tarfile.TarInfo("net/a.txt")
        info.pax_headers = {"comment": "x" * (5 << 20)}
        refused(tgz(path, self.FILES, info), "a member with headers of more than 1 MiB")

    def test_every_truncation(self, path: Path) -> None:
        whole = tgz(path, self.FILES).read_bytes()
        for length in range(3, len(whole), 7):
            path.write_bytes(whole[:length])
            refused(path, "is damaged or truncated")

    def test_a_plain_one_that_ends_inside_a_file(self, path: Path) -> None:
        tgz(path, self.FILES)
        path.write_bytes(gzip.decompress(path.read_bytes())[:1600])
        refused(path, "is (damaged or )?truncated")

    def test_something_else_compressed(self, path: Path) -> None:
        path.write_bytes(gzip.compress(b"text"))
        refused(path, "is damaged or truncated")


class TestFolder:
    def test_a_link_that_leads_out(self, tmp_path: Path) -> None:
        (tmp_path / "secret.json").write_text("{}")
        folder = tmp_path / "net"
        (folder / "MAR-INF").mkdir(parents=True)
        (folder / "MAR-INF" / "MANIFEST.json").write_bytes(manifest(modelName="net", serializedFile="a.pt"))
        (folder / "a.pt").write_bytes(torch_file(*SCRIPT))
        (folder / "labels.json").symlink_to("../secret.json")
        refused(folder, r"labels.json is a link that leads out of net; put a copy of the file in its place")

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "net.mar")
        refused(tmp_path / "net.mar", "is a device, pipe or socket")
