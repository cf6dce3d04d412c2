"""Triton's public examples and tests of quality, where a copy of their repositories is at hand.

They are not part of this repository. ``TRITON_CLIENT`` and ``TRITON_SERVER`` name checkouts of Triton's repositories
``client`` and ``server``; docs/guides/migrate/triton.md lists the results.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ingot
from benchmarks.serving.processes import free_ports
from ingot import RunningServer
from tests.server.interop import triton_models
from tests.support import ROOT

CLIENT, SERVER = (os.environ.get(name) for name in ("TRITON_CLIENT", "TRITON_SERVER"))
SETTINGS = {
    "image": 'labels = "labels.txt"\n',
    "simple_sequence": 'states = "seen=seen_next"\n',
    "repeat_int32": 'states = "at=at_next"\nrepeat = "WAIT=WAIT_next"\nrepeat_until = "done"\n',
}
# The others need a GPU, the name "triton", the control of models, or text that is not UTF-8 in ONNX Runtime.
EXAMPLES = [
    "grpc_client",
    "grpc_explicit_byte_content_client",
    "grpc_explicit_int8_content_client",
    "grpc_explicit_int_content_client",
    "memory_growth_test",
    "reuse_infer_objects_client",
    "simple_grpc_aio_infer_client",
    "simple_grpc_aio_sequence_stream_infer_client",
    "simple_grpc_async_infer_client",
    "simple_grpc_custom_args_client",
    "simple_grpc_custom_repeat",
    "simple_grpc_infer_client",
    "simple_grpc_keepalive_client",
    "simple_grpc_sequence_stream_infer_client",
    "simple_grpc_sequence_sync_infer_client",
    "simple_grpc_shm_client",
    "simple_grpc_shm_string_client",
    "simple_grpc_string_infer_client",
    "simple_http_aio_infer_client",
    "simple_http_async_infer_client",
    "simple_http_infer_client",
    "simple_http_sequence_sync_infer_client",
    "simple_http_shm_client",
    "simple_http_shm_string_client",
    "simple_http_string_infer_client",
]
HTTP_TEST = [
    "raw_binary",
    "raw_binary_longer",
    "byte",
    "multi_variable_dimensions",
    "multi_inputs",
    "content_encoding_unsupported_client",
    "json_recursion_depth_limit",
    "duplicate_output_names",
    "inference_header_content_length_out_of_range",
]
GRPC_TEST = ["bytes_contents_many_elements_serialization", "duplicate_output_names_rejected"]
QA = {
    "L0_infer_zero": ["infer_zero_test.py"],
    "L0_http": ["http_test.py", *(f"HttpTest.test_{name}" for name in HTTP_TEST)],
    "L0_grpc": ["python_unit_test.py", *(f"GrpcTest.test_{name}" for name in GRPC_TEST)],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on the ports that the examples use."""
    folder = tmp_path_factory.mktemp("models")
    models = triton_models.everything(folder)
    (folder / "labels.txt").write_text("".join(f"class {number}\n" for number in range(10)))
    (folder / "ingot.toml").write_text(
        "\n".join(f'[[model]]\nsource = "{path}"\n{SETTINGS.get(path.stem, "")}' for path in models)
    )
    with ingot.serve(config=folder / "ingot.toml", shared_memory="*") as running:
        yield running


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "BACKENDS": "onnx", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    text = ran.stdout + ran.stderr
    assert ran.returncode == 0, text[-4000:]
    return text


@pytest.mark.long
@pytest.mark.skipif(CLIENT is None, reason="TRITON_CLIENT does not name a checkout of Triton's clients")
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_tritonclient_runs(name: str) -> None:
    text = run(Path(str(CLIENT)) / "src" / "python" / "examples", f"{name}.py")
    if "explicit" in name:  # which exit with 0 if the error is another one, too
        assert "PASS" in text


@pytest.mark.long
@pytest.mark.skipif(CLIENT is None, reason="TRITON_CLIENT does not name a checkout of Triton's clients")
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", ["image_client", "grpc_image_client"])
def test_an_image_is_classified(name: str, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (40, 40)).save(tmp_path / "image.png")
    # Over HTTP, image_client needs a package that does not support Python from 3.10 on.
    protocol = ["-i", "grpc"] if name == "image_client" else []
    options = ["-m", "image", "-u", "localhost:8001", *protocol, "-c", "2", str(tmp_path / "image.png")]
    text = run(Path(str(CLIENT)) / "src" / "python" / "examples", f"{name}.py", *options)
    assert "9.000000 (9) = class 9" in text


@pytest.mark.long
@pytest.mark.skipif(CLIENT is None, reason="TRITON_CLIENT does not name a checkout of Triton's clients")
def test_models_are_controlled_on_the_management_listener(tmp_path: Path) -> None:
    models = [triton_models.simple(tmp_path, name) for name in ("simple", *"abcdef")]
    place = f"127.0.0.1:{free_ports(1)[0]}"
    with ingot.serve(*map(str, models), http_port=0, grpc_port=0, management=place, insecure=True):
        folder = Path(str(CLIENT)) / "src" / "python" / "examples"
        assert "PASS" in run(folder, "simple_http_model_control.py", "-u", place)


@pytest.mark.long
@pytest.mark.skipif(SERVER is None, reason="TRITON_SERVER does not name a checkout of Triton")
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", QA)
def test_cases_of_tritons_qa_pass(name: str) -> None:
    run(Path(str(SERVER)) / "qa" / name, *QA[name])
