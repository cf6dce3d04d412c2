"""Starting and stopping, as a user and an orchestrator see it: the real command in its own process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.cli.serving.serve import curl
from ingot.errors import AlreadyExists, IngotError, InternalError, InvalidArgument, NotFound, Unavailable
from ingot.protocol import json_codec
from ingot.protocol.requests import InferRequest, Template
from ingot.tensors import DType, Signature, TensorSpec
from ingot.tensors.values import ValueRange
from tests import onnx_models
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.support import ROOT, RequireTool


@contextmanager
def running(
    *arguments: str, home: Path, gate: Gate | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run ``ingot serve``, on free ports by default, until the block ends; yields the process and its addresses."""
    program = ["ingot"] if gate is None else ["tests.server.gates", str(gate.path)]
    command = [sys.executable, "-m", *program, "serve", "--http-port", "0", "--grpc-port", "0", "--json", *arguments]
    environment = {**os.environ, "INGOT_HOME": str(home)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout is not None
    late = threading.Timer(120, process.kill)  # which ends the line that is waited for
    late.start()
    try:
        line = process.stdout.readline()
        late.cancel()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        late.cancel()
        process.kill()
        process.communicate(timeout=60)


@contextmanager
def two_in_flight(addresses: Mapping[str, str], gate: Gate) -> Iterator[list[Any]]:
    """Ask the held model over both protocols, yield while both requests are in flight, and let them be answered.

    They are answered once the server accepts no more connections.
    """
    x = np.ones((64, 1024), np.float32)
    answers: list[Any] = []

    def ask(url: str) -> None:
        with ingot.Client(url) as client:
            answers.append(client.infer("held", {"x": x})["y"].shape)

    asking = [threading.Thread(target=ask, args=(addresses[key],)) for key in ("http", "grpc")]
    with gate.closed():
        for thread in asking:
            thread.start()
        until_in_flight(addresses, 2)
        yield answers
        assert not answers
        wait_until(lambda: all(refuses(addresses[key]) for key in ("http", "grpc")))
    for thread in asking:
        thread.join(120)


def until_in_flight(addresses: Mapping[str, str], count: int) -> None:
    """Wait until so many requests to the held model are accepted."""
    line = f'ingot_in_flight_requests{{model="held",version="1"}} {count:.1f}'
    with ingot.Client(addresses["http"]) as client:
        wait_until(lambda: line in client.metrics(), 60)


def refuses(url: str) -> bool:
    """Return whether an address refuses connections."""
    host, _, port = url.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_in_flight_finishes_when_the_server_is_stopped(
    folder: Path, gate: Gate, number: signal.Signals
) -> None:
    with running(str(onnx_models.held(folder)), home=folder, gate=gate) as (process, addresses):
        with two_in_flight(addresses, gate) as answers:
            process.send_signal(number)
        assert process.wait(30) == 0
    assert answers == [(64, 1024)] * 2
    with ingot.Client(addresses["http"]) as client, pytest.raises(Unavailable):
        client.ready()


@contextmanager
def one_held(addresses: Mapping[str, str], gate: Gate) -> Iterator[None]:
    """Ask the held model over HTTP, which is never answered, until the block ends."""

    def ask() -> None:
        with ingot.Client(addresses["http"]) as client, pytest.raises(IngotError):
            client.infer("held", {"x": np.ones((1, 3), np.float32)})

    asking = threading.Thread(target=ask)
    with gate.closed():
        asking.start()
        until_in_flight(addresses, 1)
        yield
        asking.join(120)


def test_a_second_signal_does_not_wait(folder: Path, gate: Gate) -> None:
    with (
        running(str(onnx_models.held(folder)), home=folder, gate=gate) as (process, addresses),
        one_held(addresses, gate),
    ):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses(addresses["http"]))  # it has begun to drain, and waits for the request
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


STUCK = """
import os, sys
from ingot.server import main
from ingot.config import ServerConfig

class Stuck:
    config = ServerConfig(drain_timeout=float(sys.argv[1]))

    async def start(self):
        print("stuck", flush=True)
        os.read(os.pipe()[0], 1)  # retried after each signal

main._STOP_SECONDS = 0.5
main.run(Stuck())
"""


@pytest.mark.matrix
@pytest.mark.parametrize(("drain", "signals"), [(0.5, 1), (3600, 600)], ids=["limit", "second signal"])
def test_a_stuck_event_loop_does_not_keep_the_process(drain: float, signals: int) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK, str(drain)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"stuck\n"
            for _ in range(signals):  # two in a row may arrive as one
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                    break
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.matrix
@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_busy_port_is_named_with_the_remedy(folder: Path, option: str) -> None:
    model = onnx_models.affine(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        other = {"--http-port": "--grpc-port", "--grpc-port": "--http-port"}[option]
        command = [sys.executable, "-m", "ingot", "serve", str(model), option, port, other, "0"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("error:")
    assert port in result.stderr
    assert f"{option} 0" in result.stderr
    assert "Traceback" not in result.stderr


def test_two_servers_cannot_share_a_grpc_port(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with ingot.serve(model, http_port=0, grpc_port=0) as first:
        port = int(first.grpc_url.rpartition(":")[2])
        with pytest.raises(InvalidArgument, match="gRPC"):
            ingot.serve(model, http_port=0, grpc_port=port)
        port = int(first.http_url.rpartition(":")[2])
        with pytest.raises(InvalidArgument, match="HTTP"):
            ingot.serve(model, http_port=port, grpc_port=0)


@pytest.mark.matrix
def test_the_environment_sets_options_and_bad_ones_are_named(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    command = [sys.executable, "-m", "ingot", "serve", model, "--http-port", "0"]
    for value in ("70000", "many"):
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**os.environ, "INGOT_GRPC_PORT": value}
        )
        assert result.returncode == 1
        assert "INGOT_GRPC_PORT" in result.stderr
        assert "Traceback" not in result.stderr


def test_invalid_sources_are_reported_with_the_remedy(folder: Path) -> None:
    module = type("Module", (), {"__module__": "torch.nn.modules.module"})
    for source, says in (
        (
            [str(onnx_models.affine(folder))],
            r"type list cannot be served; .* one by one: serve\('digits:1', 'other:1'\)",
        ),
        (object(), "type object cannot be served; give paths, references such as digits:1, or Archives"),
        (None, "type NoneType cannot be served"),
        (type("Net", (module,), {})(), r"type Net cannot be served; export the module first"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            ingot.serve(source, http_port=0, grpc_port=0)  # type: ignore[arg-type]


def test_a_file_may_be_a_path(folder: Path) -> None:
    with ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0) as server:
        assert server.models == ["affine"]


def test_names_versions_and_sources(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with ingot.serve(model, f"other={model}", http_port=0, grpc_port=0) as server:
        assert server.models == ["affine", "other"]
        with ingot.Client(server.http_url) as client:
            assert client.ready("other")
    with pytest.raises(AlreadyExists, match="rename one"):
        ingot.serve(model, model, http_port=0, grpc_port=0)
    with pytest.raises(NotFound, match=r"nowhere\.onnx"):
        ingot.serve("nowhere.onnx", http_port=0, grpc_port=0)
    with pytest.raises(NotFound, match="no file"):
        ingot.serve("./nowhere.ingot", http_port=0, grpc_port=0)
    with pytest.raises(InvalidArgument, match="nothing to serve"):
        ingot.serve(http_port=0, grpc_port=0)
    with pytest.raises(NotFound, match="no model 'nowhere'"):
        ingot.serve("nowhere:1", store=ingot.Store(folder / "store"), http_port=0, grpc_port=0)


def test_a_file_that_is_not_a_model(folder: Path) -> None:
    broken = folder / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(IngotError, match="cannot load"):
        ingot.serve(str(broken), http_port=0, grpc_port=0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # Python ignores SystemExit there
@pytest.mark.parametrize("failure", [SystemExit(3), ZeroDivisionError("unforeseen")])
def test_a_failure_of_any_kind_at_the_start_is_raised_by_serve(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Code of a model may end its thread, for which the server would wait forever."""

    def fail(*_: object, **__: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        if isinstance(failure, SystemExit):
            patch.setattr("ingot.runtime.model.Model.load", fail)
        else:
            patch.setattr("ingot.server.listeners.Listeners.set_serving", fail)
        with pytest.raises(InternalError, match=r"could not start: (the code ends the process|unforeseen)"):
            ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0)
    ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0).close()


def test_closing_twice_is_harmless(folder: Path) -> None:
    server = ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0)
    server.close()
    server.close()
    with ingot.Client(server.http_url) as client, pytest.raises(Unavailable):
        client.ready()


def test_missing_cuda_is_reported(folder: Path) -> None:
    from ingot.runtime.machine import devices

    if devices.has_cuda():
        pytest.skip("this machine has a GPU")
    with pytest.raises(IngotError, match="'cuda' is not available"):
        ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, device="cuda")


@pytest.mark.matrix
def test_a_client_that_hangs_up_is_skipped(folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over either protocol: the engine runs only requests whose clients still wait."""
    hold(gate.path, monkeypatch.setattr)
    model = onnx_models.held(folder)
    x = np.ones((64, 1024), np.float32)
    body, length = json_codec.encode_request(InferRequest(Template("held"), {"x": x}), binary=True)
    with ingot.serve(str(model), http_port=0, grpc_port=0) as server, ingot.Client(server.http_url) as client:

        def wait_for(line: str) -> None:
            wait_until(lambda: f"{line}\n" in client.metrics(), 60)

        def occupy() -> None:
            with ingot.Client(server.grpc_url) as other:
                other.infer("held", {"x": x})

        staying = threading.Thread(target=occupy)
        with gate.closed():
            staying.start()
            wait_for('ingot_in_flight_requests{model="held",version="1"} 1.0')
            port = int(server.http_url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                head = f"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                leaving.sendall(f"{head}{json_codec.HEADER_LENGTH}: {length}\r\n\r\n".encode() + body)
                wait_for('ingot_in_flight_requests{model="held",version="1"} 2.0')
            wait_for('ingot_requests_total{code="cancelled",model="held",protocol="http",version="1"} 1.0')
        staying.join(120)
        wait_for('ingot_in_flight_requests{model="held",version="1"} 0.0')
        assert 'ingot_batch_requests_sum{model="held",version="1"} 1.0' in client.metrics()


@pytest.mark.matrix
def test_the_drain_ends_in_time_even_if_the_engine_hangs(folder: Path, gate: Gate) -> None:
    with (
        running(str(onnx_models.held(folder)), "--drain-timeout", "1", home=folder, gate=gate) as (process, addresses),
        one_held(addresses, gate),
    ):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_invalid_settings(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with pytest.raises(InvalidArgument, match="no setting 'http_prot'"):
        ingot.serve(model, http_prot=0)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="http_port is 70000"):
        ingot.serve(model, http_port=70000)


@pytest.mark.matrix
def test_settings_are_logged_at_the_start(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with running(model, "--slo", "50ms", "--drain-timeout", "5s", home=folder) as (_, told):
        assert told["settings"] == {"slo": 0.05, "drain_timeout": 5}


def test_an_archive_is_served_as_it_is(digits_archive: Path) -> None:
    archive = ingot.Archive.open(digits_archive)
    with ingot.serve(archive, http_port=0, grpc_port=0) as server, ingot.Client(server.http_url) as client:
        assert client.infer("digits", {"image": np.zeros((1, 1, 8, 8), np.float32)})["logits"].shape == (1, 10)


@pytest.mark.parametrize("name", ["model.pt", "train.py"])
def test_files_that_cannot_be_served_say_what_can(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / name).write_text("x")
    with pytest.raises(InvalidArgument, match=f"{name} is not an Ingot archive; run ingot export"):
        ingot.serve(name, http_port=0, grpc_port=0)


@pytest.mark.matrix
def test_a_server_that_is_not_ready_any_more_still_answers_for_a_while(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    x = np.ones((1, 3), np.float32)
    with running(model, "--ready-delay", "60s", home=folder) as (process, addresses):
        with ingot.Client(addresses["http"]) as http, ingot.Client(addresses["grpc"]) as grpc:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not (http.ready() or grpc.ready()), 60)
            for client in (http, grpc):
                assert not client.ready("affine")
                assert client.infer("affine", {"x": x})["y"].tolist() == [[3, 3, 3]]
        with ingot.Client(addresses["http"]) as late:
            assert late.infer("affine", {"x": x})["y"].tolist() == [[3, 3, 3]]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


@pytest.mark.matrix
def test_a_server_without_requests_in_flight_stops_after_its_delay(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with running(model, "--ready-delay", "100ms", home=folder) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("values", "sent"),
    [(None, 1), (ValueRange(0, 1), 1), (ValueRange(0, 999), 1), (ValueRange(5), 5), (ValueRange(-3, -2), -2)],
)
def test_the_command_that_serve_prints_sends_a_mask_that_hides_nothing(values: ValueRange | None, sent: int) -> None:
    signature = Signature((TensorSpec("mask", DType.INT64, ("batch", "seq"), values),), (), "batch")
    absent = dict.fromkeys(("repeat", "streams", "steps"))
    model = SimpleNamespace(name="m", signature=signature, decoupled=False, sequential=False, example={}, **absent)
    assert f'"data":[{sent}]' in curl("http://localhost", model)


@pytest.mark.matrix
def test_the_command_that_serve_prints_is_answered(server: RunningServer, require_tool: RequireTool) -> None:
    """One for each model; those that cannot be called by a short one have none."""
    require_tool("curl")
    commands = {model.name: curl(server.http_url, model) for model in server._server.repository}
    assert len(list(filter(None, commands.values()))) > 10
    for name, command in commands.items():
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
        assert not command or b'"outputs"' in done.stdout or name == "reciprocal", (command, done.stdout)
