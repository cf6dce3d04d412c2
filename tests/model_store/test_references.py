from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArgument
from ingot.model_store import Reference, RegistryAddress
from ingot.model_store.references import (
    is_version,
    name_from,
    pulled_name,
    served_name_from,
    valid_name,
    version_key,
    written_name,
)

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("digits", Reference("digits")),
        ("digits:1", Reference("digits", "1")),
        ("team/vision/digits_v2:1.0-rc1", Reference("team/vision/digits_v2", "1.0-rc1")),
        (f"digits@{DIGEST}", Reference("digits", None, DIGEST)),
        ("digits#int8", Reference("digits", None, None, "int8")),
        (f"digits:prod@{DIGEST}#int8", Reference("digits", "prod", DIGEST, "int8")),
        ("a__b.c-d--e:_x", Reference("a__b.c-d--e", "_x")),
    ],
)
def test_a_reference_is_parsed_and_shown_alike(text: str, reference: Reference) -> None:
    assert Reference.parse(text) == reference
    assert str(reference) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "d\u212aigits",  # the sign of Kelvin, which is a k in lower case
        "digits:",
        "digits:a b",
        "digits:1:2",
        ":1",
        "../digits:1",
        "/etc/passwd",
        "a//b",
        "a/",
        ".hidden",
        "a..b",
        "digits\n",
        "digits:1\n",
        f"digits:{'1' * 129}",
        "digits@sha256:abc",
        f"digits@{DIGEST.upper()}",
        "digits#",
        "digits#a b",
        "d\u00efgits",
    ],
)
def test_a_malformed_reference_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgument, match="such as digits:1"):
        Reference.parse(text)


def test_versions_are_distinguished_from_aliases() -> None:
    for version in ("1", "10", "v2", "1.2.3", "1.0-rc1", "2024-01-31", "1_b"):
        assert is_version(version)
    for alias in ("prod", "latest", "vision", "rc1", "_1"):
        assert not is_version(alias)


def test_versions_sort_as_people_read_them() -> None:
    ordered = ["0.9", "1.0-alpha", "1.0-rc1", "1.0-rc2", "1.0", "1.0.1", "1.9", "1.10", "2", "v3", "10", "2024"]
    assert sorted(sorted(ordered), key=version_key) == ordered


@pytest.mark.matrix
@given(st.text(max_size=30))
def test_any_identifier_maps_to_a_valid_name(text: str) -> None:
    assert valid_name(name_from(text)) == name_from(text)


def test_a_name_keeps_what_it_can() -> None:
    assert name_from("MyNet") == "mynet"
    assert name_from("resnet_50.v2") == "resnet_50.v2"
    assert name_from("Simple_String") == "simple_string"
    assert name_from("Simple String") == "simple-string"
    assert name_from("---") == "model"
    assert served_name_from("My Net") == "My-Net"


def test_references_are_normalized_to_lower_case() -> None:
    text = "oci://host/Team/MyNet:RC1#Int8"
    assert str(Reference.parse(text)) == "oci://host/team/mynet:RC1#Int8"
    assert written_name(text) == "Team/MyNet"
    with pytest.raises(InvalidArgument, match="'blobs' is a reserved file name"):
        Reference.parse("Blobs")


def test_a_name_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot name a model; use lower-case letters"):
        valid_name("My Net")


def test_the_hub_is_spoken_to_where_its_registry_is() -> None:
    for host in ("docker.io", "index.docker.io", "registry-1.docker.io"):
        assert RegistryAddress.parse(f"oci://{host}").url == "https://registry-1.docker.io"
    assert RegistryAddress.parse("oci://mydocker.io:5000").url == "https://mydocker.io:5000"


@pytest.mark.parametrize(
    ("registry", "scheme", "host", "user", "may"),
    [
        ("oci://registry.local", "https", "elsewhere", "", True),
        ("oci://registry.local", "http", "registry.local", "", False),
        ("oci://registry.local", "http", "localhost", "", False),
        ("oci://localhost", "http", "127.0.0.1", "", True),
        ("oci://localhost", "http", "registry.local", "", False),
        ("oci+https://localhost", "http", "localhost", "", False),
        ("oci+http://registry.local", "http", "elsewhere", "", True),
        ("oci+http://registry.local", "ftp", "elsewhere", "", False),
        ("oci://registry.local", "https", "elsewhere", "ann:secret", False),
        ("oci://registry.local", "https", "", "", False),
        ("oci://registry.local", "", "elsewhere", "", False),
    ],
)
def test_a_registry_leads_by_plain_http_nowhere_that_was_not_meant(
    registry: str, scheme: str, host: str, user: str, may: bool
) -> None:
    assert RegistryAddress.parse(registry).may_lead_to(scheme, host, user) is may


@pytest.mark.parametrize(
    ("registry", "name"),
    [
        ("oci://registry.local:5000", "oci/registry.local__5000/team/tiny"),
        ("oci://Registry.local", "oci/registry.local__443/team/tiny"),
        ("oci+http://registry.local", "oci/registry.local__80/team/tiny"),
        ("oci://registry.local-5000", "oci/registry.local-5000__443/team/tiny"),
        ("oci://blobs", "oci/blobs__443/team/tiny"),
        ("oci://[::1]:5000", "oci/x_5b3a3a315d__5000/team/tiny"),
        ("oci://a..b", "oci/x_612e2e62__443/team/tiny"),
    ],
)
def test_each_registry_has_separate_names_in_a_store(registry: str, name: str) -> None:
    assert pulled_name(RegistryAddress.parse(registry), "team/tiny") == name
    assert Reference.parse(f"{name}:1").name == name
