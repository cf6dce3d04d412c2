"""The contract that the store and a registry share."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from ingot.errors import AlreadyExists, InvalidArchive, InvalidArgument, NotFound, TagMoved
from ingot.model_store import Archive, Reference, Store, Transfer
from ingot.model_store.places import Place, locate, locate_file
from ingot.model_store.registry import Registry
from ingot.model_store.trust import signing
from ingot.model_store.trust.keys import PrivateKey
from tests.model_store.samples import archive
from tests.model_store.signers import KEY, OTHER

FIRST, SECOND = archive(b"one"), archive(b"two")
NOWHERE = f"sha256:{'0' * 64}"
_numbers = count()


@pytest.fixture(params=["store", "registry"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Store(tmp_path / "store") if request.param == "store" else Registry(request.getfixturevalue("registry"))


@pytest.fixture
def name() -> str:
    """A model of this test alone."""
    return f"places/tiny{next(_numbers)}"


class TestFind:
    def test_a_tag_is_filled_in_with_its_digest(self, place: Place, name: str) -> None:
        place.push(FIRST, f"{name}:1")
        got, found = place.find(f"{name}:1#int8")
        assert (got.digest, found.name, found.tag, found.digest, found.variant) == (
            FIRST.digest,
            name,
            "1",
            FIRST.digest,
            "int8",
        )

    def test_without_a_tag_it_is_the_highest_version(self, place: Place, name: str) -> None:
        for tag in ("9", "10", "10-rc1", "prod", "2"):
            place.push(FIRST if tag == "10" else SECOND, f"{name}:{tag}")
        found, reference = place.find(name)
        assert (found.digest, reference.tag) == (FIRST.digest, "10")

    def test_without_a_version_the_only_tag_is_taken_and_of_several_none_is_guessed(
        self, place: Place, name: str
    ) -> None:
        place.push(FIRST, f"{name}:prod")
        assert place.find(name)[1].tag == "prod"
        place.push(FIRST, f"{name}:canary")
        with pytest.raises(
            NotFound, match=rf"{name}' has no version; name one of its tags: (prod, canary|canary, prod)"
        ):
            place.find(name)

    def test_a_digest_is_found_by_its_version_before_its_aliases(self, place: Place, name: str) -> None:
        for tag in ("canary", "1"):
            place.push(FIRST, f"{name}:{tag}")
        assert place.find(f"{name}@{FIRST.digest}")[1].tag == "1"
        assert place.find(f"{name}:canary@{FIRST.digest}")[0].digest == FIRST.digest

    @pytest.mark.parametrize("suffix", [":2", f"@{NOWHERE}"])
    def test_a_missing_name_is_reported_with_existing_ones(self, place: Place, name: str, suffix: str) -> None:
        place.push(FIRST, f"{name}:1")
        with pytest.raises(NotFound, match=f"has no '.*{name}{suffix}'; '{name}' has: 1$"):
            place.find(f"{name}{suffix}")

    def test_a_moved_tag_is_reported_with_its_current_digest(self, place: Place, name: str) -> None:
        place.push(FIRST, f"{name}:prod")
        place.push(SECOND, f"{name}:prod")
        with pytest.raises(NotFound, match=f"'{name}:prod' is {SECOND.digest} now; a digest without a tag"):
            place.find(f"{name}:prod@{FIRST.digest}")

    @pytest.mark.parametrize("reference", ["places/none:1", "places/none"])
    def test_a_missing_model_is_reported(self, place: Place, reference: str) -> None:
        with pytest.raises(NotFound, match="has no model 'places/none'"):
            place.find(reference)


class TestPush:
    def test_a_version_never_changes(self, place: Place, name: str) -> None:
        place.push(FIRST, f"{name}:1")
        place.push(FIRST, f"{name}:1")
        with pytest.raises(
            AlreadyExists, match=f"a version never changes; copy it as another version, such as {name}:2"
        ):
            place.push(SECOND, f"{name}:1")
        assert place.tags(name) == {"1": FIRST.digest}

    def test_an_alias_moves(self, place: Place, name: str) -> None:
        for item in (FIRST, SECOND):
            place.push(item, f"{name}:prod")
        assert place.tags(name) == {"prod": SECOND.digest}

    @pytest.mark.parametrize("expect", [NOWHERE, "none"])
    def test_an_unexpected_tag_is_reported_before_copying(self, place: Place, name: str, expect: str) -> None:
        place.push(FIRST, f"{name}:prod")
        transfer = Transfer()
        with pytest.raises(TagMoved, match=f"'{name}:prod' is {FIRST.digest}, not {expect}: it was moved"):
            place.push(archive(name.encode()), f"{name}:prod", expect=expect, transfer=transfer)
        assert (transfer.total, transfer.done) == (0, 0)
        place.push(SECOND, f"{name}:prod", expect=FIRST.digest)
        place.push(SECOND, f"{name}:new", expect="none")
        assert place.tags(name) == {"prod": SECOND.digest, "new": SECOND.digest}

    @pytest.mark.parametrize("suffix", ["", f"@{NOWHERE}", f":1@{NOWHERE}", ":1#int8"])
    def test_it_needs_a_name_and_a_tag(self, place: Place, name: str, suffix: str) -> None:
        with pytest.raises(InvalidArgument, match=f"is not a target of copies; write name:tag, such as {name}:1"):
            place.push(FIRST, f"{name}{suffix}")

    def test_attachments_are_copied_too(self, place: Place, name: str) -> None:
        place.push(FIRST.with_signature(b"{1}"), f"{name}:1")
        place.attach(place.find(f"{name}:1")[0].with_signature(b"{2}"), name)
        assert sorted(place.find(f"{name}:1")[0].signatures()) == [b"{1}", b"{2}"]
        assert place.tags(name) == {"1": FIRST.digest}
        with pytest.raises(NotFound, match=f"has no '{name}@{SECOND.digest}'"):
            place.attach(SECOND.with_signature(b"{1}"), name)


class TestPromote:
    def test_an_alias_is_pointed_at_what_a_reference_names(self, place: Place, name: str) -> None:
        for tag, item in (("1", FIRST), ("2", SECOND)):
            place.push(item, f"{name}:{tag}")
        assert place.promote(name, "prod", expect="none").digest == SECOND.digest
        assert place.promote(f"{name}@{FIRST.digest}", "prod", expect=SECOND.digest).tag == "prod"
        with pytest.raises(TagMoved, match=f"'{name}:prod' is {FIRST.digest}, not none"):
            place.promote(f"{name}:2", "prod", expect="none")
        with pytest.raises(AlreadyExists, match="a version never changes"):
            place.promote(f"{name}:1", "2")
        assert place.tags(name) == {"1": FIRST.digest, "2": SECOND.digest, "prod": FIRST.digest}

    @pytest.mark.parametrize("alias", [f"prod@{NOWHERE}", "prod#int8", "a b", "", f"sha256-{'0' * 64}"])
    def test_only_a_tag_can_be_moved(self, place: Place, name: str, alias: str) -> None:
        place.push(FIRST, f"{name}:1")
        with pytest.raises(InvalidArgument, match=f"'{alias}' is not a tag; write letters"):
            place.promote(f"{name}:1", alias)
        assert place.tags(name) == {"1": FIRST.digest}


class TestDigestOf:
    def test_it_is_that_of_one_tag(self, place: Place, name: str) -> None:
        assert place.digest_of(name, "prod") is None
        place.push(FIRST, f"{name}:prod")
        assert (place.digest_of(name, "prod"), place.digest_of(name, "1")) == (FIRST.digest, None)

    @pytest.mark.parametrize("tag", ["a/../b", f"prod@{NOWHERE}", ""])
    def test_a_malformed_tag_has_no_digest(self, place: Place, name: str, tag: str) -> None:
        with pytest.raises(InvalidArgument, match="is not a tag"):
            place.digest_of(name, tag)


class TestAttach:
    def signed(self, key: PrivateKey) -> Archive:
        return FIRST.with_signature(signing.sign(FIRST, "tiny", key))

    def test_attachments_are_added_or_replaced(self, place: Place, name: str) -> None:
        place.push(self.signed(KEY), f"{name}:1")
        place.attach(self.signed(OTHER), name)
        assert {claim.keyid for claim in signing.describe(place.find(f"{name}:1")[0])} == {
            KEY.public.keyid,
            OTHER.public.keyid,
        }
        place.attach(self.signed(OTHER), name, replace=True)
        (claim,) = signing.describe(place.find(f"{name}:1")[0])
        assert claim.keyid == OTHER.public.keyid

    def test_a_missing_archive_cannot_be_signed(self, place: Place, name: str) -> None:
        place.push(SECOND, f"{name}:1")
        with pytest.raises(NotFound, match="has no"):
            place.attach(self.signed(KEY), name, replace=True)


class TestRemove:
    def test_a_tag_is_removed(self, place: Place, name: str) -> None:
        for tag, item in (("1", FIRST), ("2", SECOND)):
            place.push(item, f"{name}:{tag}")
        removed = place.remove(f"{name}:1@{FIRST.digest}", expect=FIRST.digest)
        assert (removed.tag, removed.digest) == ("1", FIRST.digest)
        assert place.tags(name) == {"2": SECOND.digest}

    def test_both_the_digest_and_the_expectation_must_hold(self, place: Place, name: str) -> None:
        place.push(FIRST, f"{name}:prod")
        with pytest.raises(TagMoved, match=f"'{name}:prod' is {FIRST.digest}, not {NOWHERE}"):
            place.remove(f"{name}:prod@{FIRST.digest}", expect=NOWHERE)
        with pytest.raises(NotFound, match=f"has no '.*{name}:prod@{NOWHERE}'"):
            place.remove(f"{name}:prod@{NOWHERE}", expect=FIRST.digest)
        assert place.tags(name) == {"prod": FIRST.digest}

    def test_a_reference_without_a_tag_is_refused(self, place: Place, name: str) -> None:
        place.push(FIRST, f"{name}:1")
        for suffix in ("", ":1#int8"):
            with pytest.raises(InvalidArgument, match=f"cannot be removed; name a tag, such as {name}:1"):
                place.remove(f"{name}{suffix}")
        with pytest.raises(NotFound, match="has: 1"):
            place.remove(f"{name}:2")


def test_a_damaged_archive_gets_no_tag(place: Place, name: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.ingot"
    archive(b"one", (name.encode() * 100,)).save(path)
    path.write_bytes(path.read_bytes().replace(name.encode() * 2, name.encode()[::-1] * 2, 1))
    with pytest.raises(InvalidArchive, match="is damaged: its content has another digest"):
        place.push(Archive.open(path), f"{name}:1")
    assert place.tags(name) == {}


def test_models_are_listed(place: Place, name: str) -> None:
    assert place.tags(name) == {}
    place.push(FIRST, f"{name}:1")
    assert name in place.names()


class TestLocate:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        store = Store(tmp_path / "store")
        store.push(FIRST, "tiny:1")
        return store

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        FIRST.save(tmp_path / "tiny.ingot")
        return tmp_path / "tiny.ingot"

    @pytest.mark.parametrize("variant", [None, "int8"])
    @pytest.mark.parametrize(
        "text", ["tiny.ingot", "./tiny.ingot", "{folder}/tiny.ingot", "file://{folder}/tiny.ingot"]
    )
    def test_a_file_is_known_as_what_it_calls_itself(
        self, store: Store, file: Path, text: str, variant: str | None
    ) -> None:
        if text.startswith("file:"):
            pytest.importorskip("obstore")
        text = text.format(folder=file.parent)
        located = locate(text + (f"#{variant}" if variant else ""), store)
        assert (located.name, located.variant) == (text, variant)
        found, reference = located.find()
        assert (found.digest, reference) == (FIRST.digest, Reference("tiny", variant=variant))

    def test_a_file_may_have_a_mark_in_its_name(self, store: Store, file: Path) -> None:
        file.rename(file.with_name("a#b.ingot"))
        assert locate("a#b.ingot", store).open().digest == FIRST.digest
        assert locate("a#b.ingot#int8", store).variant == "int8"
        assert locate_file("a#b.ingot").open().digest == FIRST.digest

    def test_a_reference_leads_to_the_store_or_to_a_registry(self, store: Store) -> None:
        assert locate("tiny:1#int8", store).find()[1] == Reference("tiny", "1", FIRST.digest, "int8")
        for name in ("tiny:1", "x.onnx", "x.ingot"):  # a model's name may end like a file's
            located = locate(f"oci://registry.local/{name}#int8", store)
            assert (located.path, located.url, located.variant) == (None, None, "int8")
            assert str(located.reference) == f"oci://registry.local/{name}#int8"

    def test_a_variant_of_a_whole_archive_is_refused(self, store: Store) -> None:
        assert locate("tiny:1", store).whole().open().digest == FIRST.digest
        with pytest.raises(InvalidArgument, match="'tiny:1' is used with all its variants here; leave #int8 out"):
            locate("tiny:1#int8", store).whole()

    @pytest.mark.parametrize("text", ["Tiny.txt", "tiny.txt"])
    def test_a_file_that_looks_like_a_reference_is_pointed_out(self, store: Store, file: Path, text: str) -> None:
        (file.parent / text).write_text("some text")
        with pytest.raises(NotFound, match=f"; for the file of that name write ./{text}"):
            locate(text, store).open()
        with pytest.raises(InvalidArchive):
            locate(f"./{text}", store).open()

    def test_an_onnx_file_is_not_an_archive(self, store: Store, file: Path) -> None:
        (file.parent / "tiny.onnx").write_bytes(b"a model")
        with pytest.raises(InvalidArgument, match=r"tiny.onnx is an ONNX model, not an archive; ingot export converts"):
            locate("tiny.onnx", store).open()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("none.ingot", "there is no file none.ingot"),
            ("none.onnx", "there is no file none.onnx"),
            ("x" * 300 + ".onnx", "cannot be read: File name too long"),
            ("~no-such-user/none.ingot", "there is no file ~no-such-user/none.ingot"),
            ("./" + "x" * 300 + ".ingot", "cannot be read: File name too long"),
            ("x" * 300 + "#int8", "cannot be read: File name too long"),
            ("ftp://host/tiny.ingot", "is not a model reference"),
            ("oci://host", "is not a model reference"),
            ("tiny model", "is not a model reference; write name:tag such as digits:1"),
            ("tiny\0.ingot", "cannot be the name of a file"),
        ],
    )
    def test_a_name_of_nothing_is_reported(self, store: Store, text: str, message: str) -> None:
        with pytest.raises((InvalidArgument, NotFound), match=message):
            locate(text, store).open()
