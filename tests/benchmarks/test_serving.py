"""The benchmark of serving in small; the run itself takes minutes and is not a test."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.serving import __main__, client, docs, goals, loads, pairs, python_models, report
from benchmarks.serving.contestants import PEERS, ROOT, CompiledIngot, Peer, contestants
from benchmarks.serving.loads import Load
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import Process, body_of, free_ports
from benchmarks.serving.rounds import Plan, Run, serving
from benchmarks.serving.versions import Version
from benchmarks.serving.wires import OpenBinary, OpenGrpc, OpenJson, PlainBinary, PlainJson
from tests.server.outside import wait_until
from tests.support import RequireTool

CLIENTS = (1, 8)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def tiny(build: Path) -> Model:
    return model("tiny", build)


@pytest.mark.matrix
def test_a_run_measures_every_contestant_and_writes_its_page(build: Path, tiny: Model, tmp_path: Path) -> None:
    plan = Plan(build, ["ingot", "fastapi"], ["tiny"], 1, 0.3, 0.3, CLIENTS, goodput=(), wrk=False)
    run = Run(plan)
    # gRPC needs h2load, which may not be installed.
    run.plan = replace(plan, formats=("json", "binary"))
    run.round(0)
    assert run.failures == []
    measured = {(r["contestant"], r["format"], r["clients"]) for r in run.records if r["kind"] == "closed"}
    assert measured == {(c, f, n) for c in ("ingot", "fastapi") for f in ("json", "binary") for n in CLIENTS}
    assert all(r["cpu_us"] > 0 and r["memory"] > 0 and r["start_s"] > 0 for r in run.records if r["kind"] == "closed")
    about = {"machine": "m", "command": "c", "date": "d", **report.versions(build, plan.peers)}
    (tmp_path / "serving.json").write_text(
        json.dumps({"about": about, "failures": [], "absent": {}, "records": run.records})
    )
    report.write(tmp_path)
    page = (tmp_path / "serving.md").read_text()
    assert "| fastapi | json |" in page
    assert (tmp_path / "tiny-binary.svg").read_text().count("<polyline") == 2


@pytest.mark.matrix
def test_an_engine_process_is_measured_and_ended_with_its_server(tmp_path: Path, require_tool: RequireTool) -> None:
    """It does not inherit the server's environment."""
    require_tool("taskset")
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**9))'], env={})"
    server = Process([sys.executable, "-c", program], {}, tmp_path / "log", core=min(os.sched_getaffinity(0)))
    try:
        wait_until(lambda: len(list(server._folders())) == 2 and server.usage().cpu > 0.5)
    finally:
        server.close()
    assert list(server._folders()) == []


def test_threads_that_have_ended_are_measured(tmp_path: Path) -> None:
    """FastAPI's functions run in threads that end when they idle."""
    program = """if True:
        import threading, time

        def burn():
            while time.thread_time() < 0.6:
                pass

        thread = threading.Thread(target=burn)
        thread.start()
        thread.join()
        print("ended", flush=True)
        time.sleep(60)
    """
    server = Process([sys.executable, "-c", program], {}, tmp_path / "log", core=None)
    try:
        wait_until(lambda: "ended" in (tmp_path / "log").read_text())
        assert server.usage().cpu >= 0.6
    finally:
        server.close()


def test_ports_that_are_found_together_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may hand out a port again as soon as it is released."""
    given, released = itertools.count(40_000), list[int]()

    @contextmanager
    def listening(address: tuple[str, int]) -> Iterator[Any]:
        port = released.pop() if released else next(given)
        yield SimpleNamespace(getsockname=lambda: (address[0], port))
        released.append(port)

    monkeypatch.setattr(socket, "create_server", listening)
    assert len(set(free_ports(4))) == 4
    monkeypatch.syspath_prepend(str(PEERS))
    assert len({40_000, 40_001, *import_module("arguments").free_ports(3, (40_000, 40_001))}) == 5


def test_compared_figures_are_of_the_same_round() -> None:
    inside, isolated = Load(10, 100.0, 1.0, 2.0, 0, 50.0), Load(10, 80.0, 1.5, 3.0, 0, 100.0)
    rows = pairs._ratios([(isolated, inside), (inside, inside), (inside, inside)])
    assert rows == ["1.00 (0.80 to 1.00)", "1.00", "1.00", "1.00"]


@pytest.mark.matrix
def test_an_open_loop_counts_answers_from_when_they_were_due(build: Path, tiny: Model) -> None:
    with serving(contestants()["ingot"], tiny, "binary", build) as server:
        found = loads.open_loop("ingot", tiny, "binary", server.start.port, build, 100, 0.5)
    assert found["due"] == 50
    assert len(found["latencies"]) + found["refused"] + found["unanswered"] == 50


@pytest.mark.matrix
def test_wrk_compares_every_answer(build: Path, tiny: Model, tmp_path: Path, require_tool: RequireTool) -> None:
    require_tool("wrk")
    contestant = contestants()["fastapi"]
    with serving(contestant, tiny, "json", build) as server:
        wrk = loads.checked_wrk(tiny, contestant.wires["json"], server.start.port, tmp_path)
        assert wrk.load(server.process, 4, 0.3).requests > 0
        checker = client.Checker(tiny, contestant.wires["json"], server.start.port)
        marks = [mark for mark in checker.marks if mark is not None]
        swapped = loads.Wrk(checker.requests, marks[1:] + marks[:1], server.start.port, tmp_path)
        with pytest.raises(loads.WrongAnswer, match="answers wrong"):
            swapped.load(server.process, 4, 0.3)


@pytest.mark.matrix
def test_a_second_client_checks_h2load(build: Path, tiny: Model, tmp_path: Path, require_tool: RequireTool) -> None:
    require_tool("h2load")
    with serving(contestants()["ingot"], tiny, "grpc", build) as server:
        assert (
            loads.H2load(tiny, OpenGrpc(), server.start.grpc_port, tmp_path).load(server.process, 8, 0.5).requests > 0
        )


@contextmanager
def swapping(tiny: Model) -> Iterator[int]:
    """A server that answers rightly while each sample is asked alone, and then with another sample's answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    answered = 0

    def answer(connection: socket.socket) -> None:
        nonlocal answered
        with connection:
            while data := connection.recv(1 << 16):
                body = data.partition(b"\r\n\r\n")[2]
                number = next(n for n, s in enumerate(tiny.samples) if s["x"].tobytes() == body)
                answered += 1
                wrong = answered > len(tiny.samples)
                content = tiny.expected[(number + wrong) % len(tiny.samples)].tobytes()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


@pytest.mark.matrix
def test_another_requests_answer_fails_the_run(build: Path, tiny: Model) -> None:
    with swapping(tiny) as port, pytest.raises(loads.WrongAnswer, match="are wrong, or errors"):
        loads.open_loop("mosec", tiny, "binary", port, build, 50, 0.3)


def test_a_server_that_is_wrong_from_the_start_is_not_measured(tiny: Model) -> None:
    with swapping(tiny) as port:
        client.Checker(tiny, PlainBinary("/"), port)
        with pytest.raises(SystemExit, match="the answer to sample 0 alone is wrong"):
            client.Checker(tiny, PlainBinary("/"), port)


def test_answers_are_read_off_every_wire(tiny: Model) -> None:
    y = tiny.expected[3]
    plain = json.dumps({"y": y.tolist()}).encode()
    opened = json.dumps({"outputs": [{"name": "y", "shape": [1, 10], "data": y.tolist()}]}).encode()
    header = json.dumps({"outputs": [{"name": "y", "parameters": {"binary_data_size": y.nbytes}}]}).encode()
    for wire, body in (
        (PlainJson("/"), plain),
        (OpenJson(), opened),
        (PlainBinary("/"), y.tobytes()),
        (OpenBinary(), header + y.tobytes()),
    ):
        assert tiny.right(wire.answer(body), 3)
        assert not tiny.right(wire.answer(body), 4)
        assert wire.mark(body) in body


def test_chunked_answers_are_joined() -> None:
    head = b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert body_of(head + b"3\r\nabc\r\n2\r\nde\r\n") is None
    assert body_of(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n") == b"abcde"


def test_a_goal_is_met_by_ratios_within_rounds() -> None:
    def record(contestant: str, number: int, rate: float) -> dict[str, object]:
        closed = goals.closed(contestant, "tiny", "json", 32)
        return {**closed, "round": number, "rate": rate, "cpu_us": 1e6 / rate}

    records = [record("ingot", n, r) for n, r in enumerate((100, 300, 260))]
    records += [record("mosec", n, r) for n, r in enumerate((100, 200, 200))]
    goal = next(goal for goal in goals.goals() if goal.title.startswith("tiny, 32 clients, json: requests"))
    assert goal.values(records) == [1.0, 1.5, 1.3]
    assert "| 1.3x (1-1.5) | in 2 of 3 rounds |" in "\n".join(report.goal_table(records))
    assert [goal.met([1.3, 1.4]), goal.met([1.0, 1.2]), goal.met([])] == ["yes", "no", ""]


def test_a_compiled_wheel_of_another_source_is_left_out(tmp_path: Path) -> None:
    [compiled] = __main__._names([*contestants()])("ingot, compiled")
    assert __main__._names([*contestants()])("mosec,ingot, compiled,fastapi") == ["mosec", compiled, "fastapi"]
    server = contestants()[compiled]
    assert isinstance(server, CompiledIngot)
    assert server.missing(tmp_path).endswith("run python -m benchmarks.serving.install 'ingot, compiled'")
    server.site(tmp_path).mkdir(parents=True)
    (server.site(tmp_path) / "ingot").symlink_to(ROOT / "ingot")
    assert server.missing(tmp_path) == ""


def test_a_version_runs_the_code_of_its_folder(tmp_path: Path) -> None:
    """Also where the working directory has a package of the same name, as that of the benchmark has."""
    (tmp_path / "ingot").mkdir()
    (tmp_path / "ingot" / "__init__.py").touch()
    Version("old", folder=str(tmp_path)).check()
    (tmp_path / "other").mkdir()
    with pytest.raises(SystemExit, match="would import"):
        Version("other", folder=str(tmp_path / "other")).check()


def test_the_documentation_has_room_for_the_figures() -> None:
    page = docs.updated(docs.PAGE.read_text(), ["figures"])
    assert "<!-- serving: begin -->\n\nfigures\n\n<!-- serving: end -->" in page
    with pytest.raises(SystemExit, match="no lines"):
        docs.updated("a page", [])


def test_every_peer_has_a_server_and_the_files_say_what_it_needs() -> None:
    for contestant in contestants().values():
        if isinstance(contestant, Peer):
            assert (contestant.requirements.parent / "server.py").exists(), contestant.name


def test_the_batch_does_not_change_the_answers_of_exact_models(tiny: Model) -> None:
    x = np.stack([sample["x"] for sample in tiny.samples])
    assert np.array_equal(tiny.session().run(None, {"x": x})[0], tiny.expected)


@pytest.mark.matrix
def test_the_same_class_is_measured_in_other_servers(build: Path, require_tool: RequireTool) -> None:
    """Every answer is compared; FastAPI stands for the peers, which share its way to load the class."""
    require_tool("wrk")
    found = {
        (name, "json"): [python_models.measure(name, "json", python_models.Empty(), build, 0.3)]
        for name in ("ingot", "fastapi")
    }
    header, rule, row = python_models.table(found)
    assert row.startswith("| ingot / fastapi | json | ")
    assert header.count("|") == rule.count("|") == row.count("|") == 7


def test_figures_of_a_python_model_are_ratios_of_one_round() -> None:
    def pair(cpu: float) -> python_models.Pair:
        return Load(10, 1e6 / cpu, 1.0, 2.0, 0, 2 * cpu), Load(10, 1e6 / cpu, 1.0, 2.0, 0, cpu)

    found = {("mosec", "json"): [pair(50), pair(100), pair(50)], ("ingot", "json"): [pair(40), pair(70), pair(60)]}
    assert python_models.table({**found, ("mosec", "binary"): [pair(1)]})[2:] == [
        "| ingot / mosec | json | 1.25 (0.83-1.43) | 1.00 (1.00-1.00) | 0.80 (0.70-1.20) | 0.80 (0.70-1.20) |"
    ]
