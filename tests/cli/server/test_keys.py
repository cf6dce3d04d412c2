"""``ingot server keys`` as a user types it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from ingot.server.access.auth_file import AuthFile
from ingot.server.access.keys import hash_of
from tests.support import RunIngot, refused, succeeded


def create(run_ingot: RunIngot, *options: str) -> str:
    return succeeded(run_ingot("server", "keys", "create", "--scope", "infer", "--name", "ci", *options)).strip()


@pytest.mark.matrix
def test_a_key_is_printed_once_and_only_its_hash_is_stored(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot(
        "server", "keys", "create", "--scope", "infer", "--scope", "metrics", "--expires", "90d", "--name", "ci"
    )
    key = succeeded(result).strip()
    assert re.fullmatch(r"ingot_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", key)  # 256 random bits
    assert key not in result.stderr
    file = tmp_path / "keys.toml"
    text = file.read_text()
    assert key.split("_", 2)[2] not in text
    assert hash_of(key) in text
    assert file.stat().st_mode & 0o777 == 0o600
    [found] = AuthFile.load(file).keys.values()
    assert (found.name, sorted(found.scopes)) == ("ci", ["infer", "metrics"])
    assert found.expires is not None
    assert found.created is not None
    assert (found.expires - found.created).days == 90
    listed = run_ingot("server", "keys", "list").stdout
    assert listed.startswith(f"{found.id}  ci  infer,metrics  active, expires 20")


@pytest.mark.matrix
def test_keys_differ_and_can_be_revoked_by_name_or_id(run_ingot: RunIngot, tmp_path: Path) -> None:
    first, second = create(run_ingot), create(run_ingot, "--expires", "never")
    assert first != second
    ids = [key.split("_")[1] for key in (first, second)]
    assert f"2 keys are named 'ci'; give the id: {', '.join(ids)}" in refused(
        run_ingot("server", "keys", "revoke", "ci")
    )
    assert succeeded(run_ingot("server", "keys", "revoke", ids[0])) == f"{ids[0]}  ci  revoked\n"
    assert "was revoked on" in run_ingot("server", "keys", "revoke", ids[0]).stderr
    assert json.loads(succeeded(run_ingot("server", "keys", "revoke", "ci", "--json")))["id"] == ids[1]
    states = [key["state"] for key in json.loads(succeeded(run_ingot("server", "keys", "list", "--json")))]
    assert states == ["revoked", "revoked"]


def test_other_lines_of_the_file_stay(run_ingot: RunIngot, tmp_path: Path) -> None:
    create(run_ingot)
    file = tmp_path / "keys.toml"
    file.write_text(f"# by hand\n{file.read_text()}# the end")
    second = create(run_ingot)
    succeeded(run_ingot("server", "keys", "revoke", second.split("_")[1]))
    text = file.read_text()
    assert text.startswith("# by hand\n# API keys")
    assert "# the end\n\n[[key]]" in text
    assert len(tomllib.loads(text)["key"]) == 2
    assert [key.revoked is None for key in AuthFile.load(file).keys.values()] == [True, False]


def test_keys_that_cannot_be_revoked_in_their_lines_are_left_alone(run_ingot: RunIngot, tmp_path: Path) -> None:
    key = create(run_ingot)
    file = tmp_path / "keys.toml"
    [found] = AuthFile.load(file).keys.values()
    text = f'key = [{{id = "{found.id}", name = "ci", hash = "{found.hash}", scopes = ["infer"]}}]\n'
    file.write_text(text)
    assert "are not as ingot server keys writes them" in refused(
        run_ingot("server", "keys", "revoke", key.split("_")[1])
    )
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", "--scope", "all", "--name", "x"], "there is no scope 'all'; there are: infer, manage, metrics"),
        (["create", "--scope", "infer", "--name", 'a"b'], "cannot be a key's name"),
        (["create", "--scope", "infer", "--name", "x", "--expires", "0d"], "write it as 12h, 90d or never"),
        (["create", "--scope", "infer", "--name", "x", "--expires", "soon"], "write it as 12h, 90d or never"),
        (["create", "--scope", "infer", "--name", "x", "--file", "no/keys.toml"], "cannot write"),
        (["list"], "there is no file keys.toml"),
        (["revoke", "x"], "there is no file keys.toml"),
    ],
)
def test_what_is_wrong_is_named(run_ingot: RunIngot, tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in refused(run_ingot("server", "keys", *arguments))
    assert list(tmp_path.glob("*.toml")) == []


@pytest.mark.matrix
def test_an_unknown_key_is_not_repeated_in_the_message(run_ingot: RunIngot) -> None:
    key = create(run_ingot)
    said = refused(run_ingot("server", "keys", "revoke", key))
    assert "no key with this id or name" in said
    assert key.split("_", 2)[2] not in said


def test_the_file_is_that_of_the_server(run_ingot: RunIngot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AUTH", str(tmp_path / "server.toml"))
    create(run_ingot)
    assert (tmp_path / "server.toml").exists()
