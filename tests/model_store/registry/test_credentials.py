"""The files that ``docker login``, ``podman login`` and ``skopeo login`` write."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ingot.errors import InvalidArgument
from ingot.model_store.registry import Credentials
from ingot.model_store.registry import credentials as module
from ingot.model_store.registry.credentials import find

HOST = "registry.local:5000"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def login(user: str, secret: str = "secret") -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{secret}".encode()).decode()}


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    return tmp_path / "docker" / "config.json"


def test_without_files_access_is_anonymous(docker: Path) -> None:
    assert find(HOST, "tiny") is None
    write(docker, {"auths": {"elsewhere": login("ann")}})
    assert find(HOST, "tiny") is None


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (login("ann", "a:b"), Credentials("ann", "a:b")),
        ({"username": "ann", "password": "ä"}, Credentials("ann", "ä")),
        ({**login("ann"), "identitytoken": "token"}, Credentials("ann", "token", identity=True)),
        ({}, None),
        (None, None),
        ({"auth": "", "email": "a@b"}, None),
    ],
)
def test_an_entry_is_read_as_the_tools_write_it(docker: Path, entry: object, expected: Credentials | None) -> None:
    write(docker, {"auths": {HOST: entry}, "HttpHeaders": {"X": "y"}})
    assert find(HOST, "tiny") == expected


@pytest.mark.parametrize("key", [HOST, f"https://{HOST}", f"https://{HOST}/v2/", f"http://{HOST}/v1", f"{HOST}/"])
def test_old_and_new_keys_name_the_same_host(docker: Path, key: str) -> None:
    write(docker, {"auths": {key: login("ann")}})
    assert find(HOST, "tiny") == Credentials("ann", "secret")


def test_the_hub_goes_by_several_names(docker: Path) -> None:
    write(docker, {"auths": {"https://index.docker.io/v1/": login("ann")}})
    assert find("docker.io", "team/tiny") == Credentials("ann", "secret")


def test_the_nearest_entry_wins(docker: Path) -> None:
    names = {HOST: "all", f"{HOST}/team": "team", f"{HOST}/team/tiny": "tiny"}
    write(docker, {"auths": {key: login(user) for key, user in names.items()}})
    users = {
        name: getattr(find(HOST, name), "user", "") for name in ("x", "team/x", "team/tiny", "team/tiny/x", "teams")
    }
    assert users == {"x": "all", "team/x": "team", "team/tiny": "tiny", "team/tiny/x": "tiny", "teams": "all"}


def test_files_are_looked_into_in_order(tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(docker, {"auths": {HOST: login("docker"), "other": login("docker")}})
    write(tmp_path / "run" / "containers" / "auth.json", {"auths": {HOST: login("podman")}})
    assert find(HOST, "x") == Credentials("podman", "secret")
    assert find("other", "x") == Credentials("docker", "secret")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(write(tmp_path / "own.json", {"auths": {HOST: login("own")}})))
    assert find(HOST, "x") == Credentials("own", "secret")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))
    assert find(HOST, "x") == Credentials("podman", "secret")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{secret", "is not a credential file"),
        ("[]", "is not a credential file"),
        ({"auths": {HOST: "secret"}}, "is not a credential file"),
        ({"auths": {HOST: {"auth": ["secret"]}}}, "is not a credential file"),
        ({"auths": {HOST: {"auth": "secret!"}}}, f"damaged credentials for '{HOST}'"),
        ({"auths": {HOST: {"auth": "c2VjcmV0"}}}, f"damaged credentials for '{HOST}'"),
        ({"auths": {HOST: {"auth": "/////w=="}}}, f"damaged credentials for '{HOST}'"),
        ({"credsStore": "../../bin/secret; x"}, "invalid name of a credential helper"),
    ],
)
def test_a_damaged_file_is_named_without_its_content(docker: Path, content: object, fault: str) -> None:
    write(docker, content)
    with pytest.raises(InvalidArgument, match=fault) as caught:
        find(HOST, "x")
    assert str(docker) in str(caught.value)
    if "credsStore" not in str(content):
        assert "secret" not in str(caught.value).lower() + repr(caught.value.__cause__)


def test_a_file_that_is_too_large_is_not_read(docker: Path) -> None:
    write(docker, " " * (1 << 20) + "{}")
    with pytest.raises(InvalidArgument, match="too large for a credential file"):
        find(HOST, "x")


class TestHelpers:
    @pytest.fixture(autouse=True)
    def programs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "bin"
        scripts = {
            "vault": 'read server; printf \'{"ServerURL":"%s","Username":"ann","Secret":"of %s"}\' "$server" "$server"',
            "token": 'printf \'{"Username":"<token>","Secret":"refresh"}\'',
            "empty": 'echo "credentials not found in native keychain"; exit 1',
            "locked": 'echo "the password is secret"; exit 1',
            "strange": "echo secret",
            "slow": "exec sleep 30",
        }
        for name, script in scripts.items():
            path = write(folder / f"docker-credential-{name}", f'#!/bin/sh\n[ "$1" = get ] || exit 2\n{script}\n')
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    def test_a_store_is_asked(self, docker: Path) -> None:
        write(docker, {"credsStore": "vault", "auths": {HOST: {}}})
        assert find(HOST, "x") == Credentials("ann", f"of {HOST}")

    def test_the_helper_of_a_host_goes_before_the_store(self, docker: Path) -> None:
        write(docker, {"credsStore": "locked", "credHelpers": {HOST: "token"}})
        assert find(HOST, "x") == Credentials("<token>", "refresh", identity=True)

    def test_credentials_missing_in_a_store_may_be_in_the_file(self, docker: Path) -> None:
        write(docker, {"credsStore": "empty", "auths": {HOST: login("ann")}})
        assert find(HOST, "x") == Credentials("ann", "secret")

    @pytest.mark.parametrize(
        ("helper", "fault"),
        [
            ("missing", "it is not installed, or not on the PATH"),
            ("locked", "it failed with status 1; try: echo registry.local:5000 | docker-credential-locked get"),
            ("strange", "its output is invalid"),
            ("slow", "it did not answer within"),
        ],
    )
    def test_a_failing_helper_is_named_without_its_output(
        self, docker: Path, helper: str, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "HELPER_SECONDS", 1.0)
        write(docker, {"credsStore": helper})
        with pytest.raises(InvalidArgument) as caught:
            find(HOST, "x")
        assert fault in str(caught.value)
        assert f"docker-credential-{helper}, which {docker} names" in str(caught.value)
        assert "secret" not in str(caught.value) + repr(caught.value.__cause__)


def test_a_secret_is_not_shown() -> None:
    assert "hunter2" not in repr(Credentials("ann", "hunter2"))
