from __future__ import annotations

import ast
import errno
import inspect
import re

import pytest

from ingot import errors, foreign
from ingot.errors import Code, ExportError, IngotError, InvalidArgument, StorageFull, missing_package, write_error
from ingot.protocol import json_codec, proto_codec
from tests.support import ROOT


def classes() -> list[type[IngotError]]:
    found = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, IngotError)]
    return sorted(found, key=lambda item: item.__name__)


def test_the_text_of_a_refused_export_has_each_fact_once() -> None:
    refused = ExportError(
        "torch.export cannot capture the model: why; do it so (at a.py:1)", "why\n\na.py:1", "headline"
    )
    assert refused.text == "headline: why\n\na.py:1"
    assert ExportError("why", "where").text == "why\n\nwhere"
    assert ExportError("why").text == "why"


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """Each line's indentation gives its parent; the picture must hold every class once, under its real base."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ├└─]*)(\w+)(  |$)", line)
        if match:
            depth = len(match[1]) // 4
            path = [*path[:depth], match[2]]
            drawn[match[2]] = path[depth - 1] if depth else ""
    real = {item.__name__: item.__mro__[1].__name__ for item in classes()}
    assert drawn == {**real, "IngotError": ""}


@pytest.mark.matrix
def test_no_error_of_the_tree_hides_in_another_module() -> None:
    names = {item.__name__ for item in classes()}
    for path in sorted((ROOT / "ingot").rglob("*.py")):
        found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        for node in found if path.name != "errors.py" else ():
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            assert not bases & names, f"{node.name} of {path.relative_to(ROOT)} belongs in ingot/errors.py"


@pytest.mark.parametrize("protocol", [json_codec, proto_codec])
def test_every_code_has_a_status_in_each_protocol(protocol: object) -> None:
    status = protocol.STATUS  # type: ignore[attr-defined]
    assert set(status) == set(Code)
    # gRPC has one status for both; only TOO_MANY_REQUESTS comes with the time of a retry.
    shared = {Code.TOO_LARGE, Code.TOO_MANY_REQUESTS} if protocol is proto_codec else set()
    assert len(set(status.values())) == len(Code) - len(shared) // 2, "a client cannot distinguish two codes"


def test_http_statuses_blame_the_right_side() -> None:
    ours = {Code.INTERNAL, Code.UNSUPPORTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.STORAGE_FULL}
    for code, status in json_codec.STATUS.items():
        assert 500 <= status < 600 if code in ours else 400 <= status < 500


def test_every_code_belongs_to_an_error() -> None:
    assert {item.code for item in classes()} == set(Code)


def test_a_missing_package_comes_with_the_command_that_installs_it() -> None:
    assert "pip install 'ingot-serve[export]'" in str(missing_package("torch", "exporting models", "export"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_is_not_the_fault_of_the_input(code: int) -> None:
    full = code in errors.FULL_DISK
    error = OSError(code, "reason")
    assert type(write_error("it cannot be written", error)) is (StorageFull if full else InvalidArgument)
    with pytest.raises(StorageFull if full else ExportError) as raised, foreign.reported_as(ExportError, "it failed"):
        raise error
    assert raised.value.__cause__ is error


def test_errors_of_foreign_code_that_are_kept_pass_as_they_are() -> None:
    error = ExportError("of Ingot")
    with pytest.raises(ExportError) as raised, foreign.reported_as(InvalidArgument, "it failed", keep=ExportError):
        raise error
    assert raised.value is error


def test_errors_that_cause_each_other_are_listed_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert list(foreign.causes(first)) == [first, second]


def test_a_cause_that_a_library_hides_is_listed() -> None:
    first, second = ValueError("first"), ValueError("second")
    second.__context__, second.__suppress_context__ = first, True  # as `raise second from None` does
    assert list(foreign.causes(second)) == [second, first]
