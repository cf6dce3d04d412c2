"""Aliases: compare-and-swap, rollback, removal, and a log that survives a process killed while writing it."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ingot.errors import AlreadyExists, InvalidArchive, InvalidArgument, NotFound, TagMoved
from ingot.model_store import Archive, BlobFolder, Descriptor, Store, Transfer
from ingot.model_store.format import attachments, manifest
from ingot.model_store.store.tags import NONE, Change
from tests.model_store.samples import archive
from tests.support import ROOT

FIRST, SECOND, THIRD = (archive(graph) for graph in (b"one", b"two", b"three"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    for tag, item in (("1", FIRST), ("2", SECOND), ("3", THIRD)):
        store.push(item, f"tiny:{tag}")
    return store


class TestPromote:
    def test_an_alias_points_to_what_was_promoted(self, store: Store) -> None:
        assert str(store.promote("tiny:1", "prod")) == f"tiny:prod@{FIRST.digest}"
        store.promote(f"tiny@{SECOND.digest}", "prod")
        assert store.get("tiny:prod").digest == SECOND.digest

    def test_without_a_tag_the_highest_version_is_promoted(self, store: Store) -> None:
        assert store.promote("tiny", "prod").digest == THIRD.digest

    def test_an_expected_digest_must_match(self, store: Store) -> None:
        store.promote("tiny:1", "prod", expect="none")
        with pytest.raises(TagMoved, match=f"'tiny:prod' is {FIRST.digest}, not none"):
            store.promote("tiny:2", "prod", expect="none")
        with pytest.raises(TagMoved, match=f"not {SECOND.digest}"):
            store.promote("tiny:2", "prod", expect=SECOND.digest)
        assert store.get("tiny:prod").digest == FIRST.digest
        store.promote("tiny:2", "prod", expect=FIRST.digest)
        assert store.get("tiny:prod").digest == SECOND.digest
        with pytest.raises(TagMoved, match=f"'tiny:new' is {NONE}, not {FIRST.digest}"):
            store.promote("tiny:2", "new", expect=FIRST.digest)

    def test_a_push_can_expect_too(self, store: Store) -> None:
        store.push(FIRST, "tiny:edge", expect="none")
        with pytest.raises(TagMoved):
            store.push(SECOND, "tiny:edge", expect="none")
        store.push(SECOND, "tiny:edge", expect=FIRST.digest)

    def test_a_version_is_never_promoted_over(self, store: Store) -> None:
        with pytest.raises(AlreadyExists, match="a version never changes"):
            store.promote("tiny:1", "2")
        assert store.promote("tiny:2", "2").digest == SECOND.digest

    @pytest.mark.parametrize("alias", ["a b", "", "prod@sha256:" + "0" * 64, "#int8", "a/b", "sha256-" + "0" * 64])
    def test_an_alias_must_be_a_tag(self, store: Store, alias: str) -> None:
        with pytest.raises(InvalidArgument):
            store.promote("tiny:1", alias)
        assert set(store.tags("tiny")) == {"1", "2", "3"}


class TestRollback:
    def test_each_rollback_goes_back_one_more_step(self, store: Store) -> None:
        for tag in ("1", "2", "3"):
            store.promote(f"tiny:{tag}", "prod")
        assert store.rollback("tiny:prod").digest == SECOND.digest
        assert store.rollback("tiny:prod").digest == FIRST.digest
        with pytest.raises(NotFound, match="has no previous target; ingot store history tiny"):
            store.rollback("tiny:prod")
        assert store.get("tiny:prod").digest == FIRST.digest

    def test_after_a_rollback_the_way_forward_is_new(self, store: Store) -> None:
        for tag in ("1", "2"):
            store.promote(f"tiny:{tag}", "prod")
        store.rollback("tiny:prod")
        store.promote("tiny:3", "prod")
        assert store.rollback("tiny:prod").digest == FIRST.digest

    def test_an_alias_that_swung_back_and_forth(self, store: Store) -> None:
        for tag in ("1", "2", "1", "2", "2"):
            store.promote(f"tiny:{tag}", "prod")
        digests = [store.rollback("tiny:prod").digest for _ in range(3)]
        assert digests == [FIRST.digest, SECOND.digest, FIRST.digest]

    def test_a_concurrent_move_wins(self, store: Store) -> None:
        for tag in ("1", "2"):
            store.promote(f"tiny:{tag}", "prod")
        with pytest.raises(TagMoved):
            store.rollback("tiny:prod", expect=FIRST.digest)

    def test_impossible_rollbacks(self, store: Store) -> None:
        for reference in ("tiny", f"tiny:prod@{FIRST.digest}", "tiny:prod#int8"):
            with pytest.raises(InvalidArgument, match="name an alias"):
                store.rollback(reference)
        with pytest.raises(NotFound, match="no previous target"):
            store.rollback("tiny:1")
        with pytest.raises(NotFound, match="no previous target"):
            store.rollback("other:prod")

    def test_a_rollback_skips_an_archive_that_is_not_whole_any_more(self, store: Store) -> None:
        for tag in ("1", "2"):
            store.promote(f"tiny:{tag}", "prod")
        store.blobs.path(FIRST.descriptor).unlink()
        with pytest.raises(NotFound, match=f"pointed to {FIRST.digest} before, which is now incomplete"):
            store.rollback("tiny:prod")


class TestRemove:
    def test_a_removed_tag_is_missing_until_pushed_again(self, store: Store) -> None:
        assert store.remove("tiny:2").digest == SECOND.digest
        with pytest.raises(NotFound):
            store.get("tiny:2")
        assert store.rollback("tiny:2").digest == SECOND.digest

    def test_a_removed_version_is_still_never_another_archive(self, store: Store) -> None:
        store.remove("tiny:3")
        with pytest.raises(AlreadyExists, match=r"held another archive .* such as tiny:4"):
            store.push(FIRST, "tiny:3")
        assert store.next_version("tiny") == "4"
        store.push(THIRD, "tiny:3")

    def test_missing_or_moved_tags_are_not_removed(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.remove("tiny:9")
        with pytest.raises(NotFound):
            store.remove(f"tiny:1@{SECOND.digest}")
        with pytest.raises(TagMoved):
            store.remove("tiny:1", expect=SECOND.digest)
        with pytest.raises(InvalidArgument, match="name a tag"):
            store.remove("tiny")
        assert set(store.tags("tiny")) == {"1", "2", "3"}


class TestHistory:
    def test_moves_are_logged_with_time_action_and_user(self, store: Store) -> None:
        store.promote("tiny:1", "prod")
        store.promote("tiny:2", "prod")
        store.rollback("tiny:prod")
        store.remove("tiny:prod")
        moves = [(move.action, move.old, move.new) for move in store.history("tiny") if move.tag == "prod"]
        assert moves == [
            ("promote", None, FIRST.digest),
            ("promote", FIRST.digest, SECOND.digest),
            ("rollback", SECOND.digest, FIRST.digest),
            ("remove", FIRST.digest, None),
        ]
        assert all(move.by and move.time.tzinfo for move in store.history("tiny"))

    def test_a_line_that_was_cut_short_is_skipped_and_not_joined(self, store: Store) -> None:
        log = store.of("tiny").reflog
        log.write_bytes(log.read_bytes() + b'{"time": "2026-01-02T03:04')
        store.promote("tiny:1", "prod")
        assert [move.tag for move in store.history("tiny")] == ["1", "2", "3", "prod"]

    def test_a_move_that_was_not_logged_is_logged_by_the_next_writer(self, store: Store) -> None:
        store.promote("tiny:1", "prod")
        before = store.of("tiny").reflog.read_bytes()
        store.promote("tiny:2", "prod")
        store.remove("tiny:3")
        store.of("tiny").reflog.write_bytes(before)  # as if both had been killed between index and log
        (store.of("tiny").folder / ".lock").write_bytes(b"*")
        store.promote("tiny:1", "other")
        moves = [(move.action, move.tag, move.new) for move in store.history("tiny")[-3:]]
        assert sorted(moves[:2]) == [("recover", "3", None), ("recover", "prod", SECOND.digest)]
        assert moves[2] == ("promote", "other", FIRST.digest)
        assert store.rollback("tiny:prod").digest == FIRST.digest

    def test_an_unknown_model_has_none(self, store: Store) -> None:
        with pytest.raises(NotFound, match="has no model 'other'"):
            store.history("other")


class TestSignatures:
    def test_a_tag_and_its_signatures_appear_in_one_step(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        write = Change._write

        def watched(change: Change, tags: dict[str, Descriptor]) -> None:
            write(change, tags)
            if "prod" in change.tags.read():
                seen.append(store.get("tiny:prod").signatures())

        monkeypatch.setattr(Change, "_write", watched)
        store.push(archive(b"four").with_signature(b"{}"), "tiny:prod")
        assert seen == [(b"{}",)]

    def test_junk_next_to_a_signature_is_ignored(self, store: Store) -> None:
        good = store.get("tiny:1").with_signature(b"good")
        junk = BlobFolder.scratch().put(b'{"schemaVersion": 2}', manifest.MANIFEST)
        junk = junk.model_copy(update={"artifact_type": attachments.SIGNATURE})
        (store.blobs.folder / junk.hex).write_bytes(b'{"schemaVersion": 2}')
        spoilt = Archive(good.blobs, good.descriptor, (junk, *good.attached))
        store.push(spoilt, "tiny:1")
        assert list(store.get("tiny:1").attached_descriptors())[-1] == good.attached[0]
        store.promote("tiny:1", "prod")

    def test_foreign_entries_next_to_a_signature_are_dropped(self, store: Store) -> None:
        signed = FIRST.with_signature(b"{}")
        noisy = [item.model_copy(update={"annotations": {"a": "b" * 3_000_000}}) for item in signed.attached]
        for _ in range(2):
            store.push(Archive(signed.blobs, signed.descriptor, noisy), "tiny:1")
        assert store.get("tiny:1").attached == signed.attached
        assert store.of("tiny").index.stat().st_size < 10_000


class TestFaults:
    def test_a_log_that_cannot_be_written_does_not_hide_that_the_tag_moved(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Change, "_log", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert store.promote("tiny:1", "prod").digest == FIRST.digest
        monkeypatch.undo()
        store.promote("tiny:2", "other")
        assert [(move.action, move.tag) for move in store.history("tiny")[-2:]] == [
            ("recover", "prod"),
            ("promote", "other"),
        ]

    def test_a_tag_that_cannot_be_one_is_not_shown(self, store: Store) -> None:
        index = store.of("tiny").index
        index.write_bytes(index.read_bytes().replace(b'"1"', b'"2  sha256:00\\nbank:prod"'))
        with pytest.raises(InvalidArchive, match="contains an invalid tag"):
            store.tags("tiny")

    def test_a_move_at_no_moment_that_there_is(self, store: Store) -> None:
        log = store.of("tiny").reflog
        log.write_bytes(re.sub(rb'"time":"[^"]+"', b'"time":"9999-12-31T23:59:59Z"', log.read_bytes(), count=1))
        with pytest.raises(InvalidArchive, match="line 1 of"):
            store.history("tiny")

    def test_a_promotion_during_a_rollback_is_kept(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        store.promote("tiny:1", "prod")
        store.promote("tiny:2", "prod")
        hold = store.leases.hold

        def late(digests: Iterable[str]) -> AbstractContextManager[None]:
            monkeypatch.undo()
            store.promote("tiny:3", "prod")
            return hold(digests)

        monkeypatch.setattr(store.leases, "hold", late)
        with pytest.raises(TagMoved):
            store.rollback("tiny:prod")
        assert store.get("tiny:prod").digest == THIRD.digest

    def test_a_push_that_cannot_win_copies_nothing(self, store: Store) -> None:
        transfer = Transfer()
        with pytest.raises(TagMoved):
            store.push(archive(b"four"), "tiny:1", expect="none", transfer=transfer)
        assert transfer.total == 0

    def test_a_missing_source_is_blamed_instead_of_the_store(self, store: Store, tmp_path: Path) -> None:
        FIRST.save(tmp_path / "a.ingot")
        opened = Archive.open(tmp_path / "a.ingot")
        (tmp_path / "a.ingot").unlink()
        for act in (lambda: Store(tmp_path / "b").push(opened, "tiny:1"), lambda: opened.save(tmp_path / "c.ingot")):
            with pytest.raises(InvalidArgument, match=r"a.ingot cannot be read"):
                act()


SWAPPER = """
import sys
from ingot.errors import TagMoved
from ingot.model_store import Store

store = Store(sys.argv[1])
sys.stdin.read()  # all start together
won = 0
while won < 10:
    now = store.tags("tiny")["prod"]
    target = "1" if now == store.tags("tiny")["2"] else "2"
    try:
        store.promote(f"tiny:{target}", "prod", expect=now)
        won += 1
    except TagMoved:
        pass
"""


@pytest.mark.matrix
def test_of_many_writers_each_swap_has_one_winner(store: Store) -> None:
    store.promote("tiny:1", "prod")
    command = [sys.executable, "-c", SWAPPER, str(store.root)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) for _ in range(6)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=120) for process in processes] == [0] * 6
    moves = [move for move in store.history("tiny") if move.tag == "prod"]
    assert len(moves) == 61
    assert all(move.old == before.new for before, move in itertools.pairwise(moves))
