from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArgument
from ingot.importing.textproto import MAX_BYTES, MAX_DEPTH, parse


def test_every_form_of_a_field() -> None:
    text = rb"""
    # a remark
    name: "resnet" 'ed' ; size: -3, ratio: 1.5f hex: 0x1F octal: 017 flag: true
    input { name: "a" dims: [1, 2] dims: 3 } input: < name: 'b' >
    output [ { name: "c" }, { name: "d" } ]
    empty: [] [org.example.more] { kind: KIND_CPU }
    text: "tab\t quote\" \303\244 \xe4\xb8\xad \u00e9 \q"
    """
    assert parse(text, "c") == {
        "name": ["resneted"],
        "size": [-3],
        "ratio": [1.5],
        "hex": [31],
        "octal": [15],
        "flag": ["true"],
        "input": [{"name": ["a"], "dims": [1, 2, 3]}, {"name": ["b"]}],
        "output": [{"name": ["c"]}, {"name": ["d"]}],
        "empty": [],
        "[org.example.more]": [{"kind": ["KIND_CPU"]}],
        "text": ['tab\t quote" ä 中 é q'],
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"name", "the end of the file stands where ':' or '{' should be"),
        (b"name:", "line 1: the end of the file stands where a value should be"),
        (b"a: 1\nb {\n c: 1", "line 3: the end of the file stands where the name of a field should be"),
        (b"a: 1 }", "'}' stands where the name of a field should be"),
        (b"a { b: 1 >", "'>' stands where the name of a field should be"),
        (b"a: [1 2]", "'2' stands where ',' or ']' should be"),
        (b'a "b"', "stands where ':' or '{' should be"),
        (b'a: "b\n"', "cannot stand here"),
        (b"a: 12x", "cannot stand here"),
        (b"a: $(rm)", "cannot stand here"),
        (b'a: "\\377"', "is no string"),
        (b'a: "\\UFFFFFFFF"', "is no string"),
        (b"\xff", "c is not text"),
        (b"a {" * (MAX_DEPTH + 2), f"messages inside each other, over {MAX_DEPTH} deep"),
        (b"a: [{", "the end of the file"),
        (b"a:1\n" * 100_000, "over 100000 words"),
        (b" " * (MAX_BYTES + 1), "c is larger than 1 MiB"),
    ],
)
def test_what_is_not_of_the_format(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse(raw, "c")
    assert message in str(error.value)


@given(st.one_of(st.binary(max_size=200), st.text("ab:{}[]<>,;\"'\\#01.-xX eEfu\n", max_size=80).map(str.encode)))
def test_anything_is_parsed_or_refused(raw: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        parse(raw, "c")
