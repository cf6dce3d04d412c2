"""``ingot infer``, asking a server as a user does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from ingot.quant.data.sources.files import load_npy
from ingot.tensors.arrays import load_npz
from tests import onnx_models
from tests.support import RunIngot, refused, succeeded

INPUT = ("affine", "--input", "x=[[1, 2, 3]]")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with ingot.serve(onnx_models.affine(tmp_path_factory.mktemp("model")), http_port=0, grpc_port=0) as running:
        yield running


@pytest.fixture(params=["http_url", "grpc_url"])
def url(request: pytest.FixtureRequest, server: RunningServer) -> str:
    return str(getattr(server, request.param))


@pytest.mark.matrix
def test_parameters_are_sent_as_numbers_flags_and_text(run_ingot: RunIngot, url: str) -> None:
    texts = ("timeout=60000000", "priority=1", "share=0.5", "flag=true", "mine=a=b", "none=null", "list=[1]")
    options = [part for text in texts for part in ("--parameter", text)]
    assert "[[3. 5. 7.]]" in succeeded(run_ingot("infer", url, *INPUT, *options))
    assert "answered" in refused(run_ingot("infer", url, *INPUT, "--parameter", "timeout=1"))
    assert "parameter 'priority' is 'high'" in refused(run_ingot("infer", url, *INPUT, "--parameter", "priority=high"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("timeout",), "'timeout' is not a valid parameter; write NAME=VALUE, such as timeout=50000"),
        (("=1",), "'=1' is not a valid parameter"),
        (("a=1", "a=2"), "parameter 'a' is given twice"),
        (("a=1" + "0" * 30,), "parameter 'a' is a whole number that does not fit into 64 bits"),
        (("a=Infinity",), "parameter 'a' is inf"),
    ],
)
def test_malformed_parameters_are_refused(
    run_ingot: RunIngot, server: RunningServer, options: tuple[str, ...], says: str
) -> None:
    command = [part for text in options for part in ("--parameter", text)]
    assert says in refused(run_ingot("infer", server.http_url, *INPUT, *command))


def test_a_value_that_is_not_json_is_refused_with_the_form_to_write(run_ingot: RunIngot, server: RunningServer) -> None:
    said = refused(run_ingot("infer", server.http_url, "affine", "--input", "x=ones.npy"))
    assert "the value of input 'x' is not JSON" in said
    assert "write x=[[1,2]], or x=@FILE for a .npy file" in said


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.mark.matrix
def test_files_other_than_arrays_are_named(run_ingot: RunIngot, server: RunningServer, tmp_path: Path) -> None:
    """numpy takes them for pickles, and speaks of allow_pickle; infer, bench and calibration read them."""
    for name, content in (("a.png", PNG), ("a.npz", PNG), ("notes.npy", b"hello")):
        (tmp_path / name).write_bytes(content)
    texts = [
        refused(run_ingot("infer", server.http_url, "affine", "--input", f"x=@{tmp_path / 'a.png'}")),
        refused(run_ingot("bench", server.http_url, "affine", "--data", tmp_path / "a.npz")),
        refused(run_ingot("infer", server.http_url, "affine", "--input", f"x=@{tmp_path / 'notes.npy'}")),
    ]
    for load, name in ((load_npz, "a.npz"), (load_npy, "a.png")):
        with pytest.raises(InvalidArgument) as error:
            load(tmp_path / name)
        texts.append(str(error.value))
    assert not [text for text in texts if "pickle" in text]
    assert "it has another format, or holds Python objects" in texts.pop(2)
    assert all("is a PNG image, not a" in text and "numpy.save" in text for text in texts)


def test_an_address_that_ends_in_v2_is_explained(run_ingot: RunIngot, server: RunningServer) -> None:
    assert "the client adds /v2 itself" in refused(run_ingot("infer", f"{server.http_url}/v2", *INPUT))


def test_http_to_the_grpc_port_is_explained_with_the_remedy(run_ingot: RunIngot, server: RunningServer) -> None:
    port = server.grpc_url.rpartition(":")[2]
    text = refused(run_ingot("infer", f"http://127.0.0.1:{port}", *INPUT))
    assert text == f"http://127.0.0.1:{port} is a server's gRPC port; write grpc://127.0.0.1:{port}"
