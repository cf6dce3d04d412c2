"""Models that are divided over processes, through the commands and HTTP: equal answers, lost processes, refusals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import ingot
from ingot.errors import InvalidArgument, Unavailable
from ingot.export.source.tensor_plan import plan_of
from ingot.tensors import Array
from tests.export.decoders import INPUT, PLAN, TOKENS
from tests.server.outside import Service, serving, wait_until
from tests.support import RunIngot, succeeded

MODEL = "tests.export.decoders:make"


def export(run_ingot: RunIngot, folder: Path, *options: str, plan: Mapping[str, str] | None = None) -> str:
    """Return the file of an exported decoder."""
    out = folder / "decoder.ingot"
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
        options = (*options, "--tensor-parallel", str(folder / "plan.json"))
    succeeded(
        run_ingot("export", MODEL, "--input", INPUT, "--to", "pt2", "--name", "decoder", *options, "--out", str(out))
    )
    return str(out)


def ids(batch: int, length: int) -> dict[str, Array]:
    return {"ids": np.random.default_rng(batch).integers(0, TOKENS, (batch, length))}


def expected(inputs: dict[str, Array]) -> Array:
    import torch

    from tests.export import decoders

    with torch.no_grad():
        return decoders.make().eval()(torch.from_numpy(inputs["ids"])).numpy()  # type: ignore[no-any-return]


def metadata(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"http://{service.http}/v2/models/decoder", trust_env=False, timeout=60).json()
    return found


def is_ready(service: Service) -> bool:
    url = f"http://{service.http}/v2/models/decoder/ready"
    return httpx.get(url, trust_env=False, timeout=60).status_code == 200


def processes_of(service: Service) -> list[int]:
    """Return the processes of the divided model, by rank, which is the order of their start."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it may have ended
            if b"ingot.runtime.engines.isolation.group" in (folder / "cmdline").read_bytes():
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return sorted(number for number, parent in parents.items() if parents.get(parent) == service.process.pid)


def check_answers(service: Service) -> None:
    with ingot.Client(f"http://{service.http}") as client:
        for batch, length in ((1, 1), (3, 7), (4, 32)):
            inputs = ids(batch, length)
            np.testing.assert_allclose(client.infer("decoder", inputs)["output"], expected(inputs), atol=1e-3)


@pytest.mark.matrix
def test_a_model_divided_by_its_plan_answers_as_one_process_does(run_ingot: RunIngot, tmp_path: Path) -> None:
    source = export(run_ingot, tmp_path, plan=PLAN)
    shown = json.loads(run_ingot("inspect", source, "--json").stdout)
    assert shown["variants"][0]["tensor_parallel"] == PLAN
    with serving("fast", tmp_path, "--shards", "2", "--allow-code", "--device", "cpu", sources=[source]) as service:
        check_answers(service)
        found = metadata(service)["properties"]
        assert found["isolation_reason"] == "it is divided over 2 processes by its tensor-parallel plan"
        assert "no access to other processes" in found["isolation_confinement"]
        assert "no sockets" in found["isolation_confinement"]
        assert len(processes_of(service)) == 2


class Load(threading.Thread):
    """Sends requests until it is stopped; keeps the errors, and checks the answers."""

    def __init__(self, service: Service):
        super().__init__(daemon=True)
        self.errors: list[str] = []
        self.answered = 0
        self.wrong: str | None = None
        self._address = f"http://{service.http}"
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        inputs = ids(4, 32)
        right = expected(inputs)
        with ingot.Client(self._address) as client:
            while not self._stopped.wait(0.001):
                try:
                    answer = client.infer("decoder", inputs)["output"]
                except Unavailable as error:
                    self.errors.append(str(error))
                    continue
                if not np.allclose(answer, right, atol=1e-3):
                    self.wrong = "an answer is wrong"
                self.answered += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join(60)
        assert not self.is_alive()
        assert self.wrong is None


def check_loss(service: Service, load: Load, lost: int) -> None:
    """Kill one of two processes under load; check the errors, and that two others answer."""
    before, victims = load.answered, processes_of(service)
    os.kill(victims[lost], signal.SIGKILL)
    wait_until(lambda: not is_ready(service), 60)
    wait_until(lambda: is_ready(service), 120)
    wait_until(lambda: load.answered > before + 10, 60)
    assert set(victims).isdisjoint(processes_of(service))
    ended = f"of model 'decoder' ended, since process {lost} of 2 ended by SIGKILL; the request may have caused it"
    wait_until(lambda: any(ended in error for error in load.errors), 60)


@pytest.mark.matrix
@pytest.mark.parametrize("plan", [PLAN, None], ids=["plan", "stages"])
def test_a_killed_process_costs_the_requests_in_flight_only(
    run_ingot: RunIngot, tmp_path: Path, plan: Mapping[str, str] | None
) -> None:
    source = export(run_ingot, tmp_path, plan=plan)
    with serving("fast", tmp_path, "--shards", "2", "--allow-code", "--device", "cpu", sources=[source]) as service:
        load = Load(service)
        wait_until(lambda: load.answered > 10)
        for lost in (1, 0):
            check_loss(service, load, lost)
        load.stop()
        check_answers(service)
        assert service.count("ingot_engine_restarts_total", model="decoder", reason="SIGKILL") == 2
        running = processes_of(service)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0
        wait_until(lambda: not any(Path(f"/proc/{number}").exists() for number in running))


@pytest.mark.matrix
def test_a_model_without_a_plan_is_divided_into_stages(run_ingot: RunIngot, tmp_path: Path) -> None:
    source = export(run_ingot, tmp_path)
    with serving("fast", tmp_path, "--shards", "3", "--allow-code", "--device", "cpu", sources=[source]) as service:
        check_answers(service)
        assert metadata(service)["properties"]["isolation_reason"] == "it is divided over 3 processes in stages"
        answer = httpx.post(
            f"http://{service.http}/v2/models/decoder/infer",
            json={"inputs": [{"name": "ids", "datatype": "INT64", "shape": [2, 1], "data": [0, TOKENS]}]},
            trust_env=False,
            timeout=60,
        )
        assert answer.status_code == 400, answer.text
        assert f"holds {TOKENS} at index [1,0], outside the range" in answer.json()["error"]
        check_answers(service)
        assert service.count("ingot_engine_restarts_total", model="decoder") == 0


@pytest.mark.matrix
def test_an_invalid_request_of_a_divided_model_gets_its_error_only(run_ingot: RunIngot, tmp_path: Path) -> None:
    """The embedding is divided by rows, so that each process has a part of the valid indices."""
    source = export(run_ingot, tmp_path, plan=PLAN)
    with serving("fast", tmp_path, "--shards", "2", "--allow-code", "--device", "cpu", sources=[source]) as service:
        with ingot.Client(f"http://{service.http}") as client:
            for number in (TOKENS, -1):
                with pytest.raises(InvalidArgument, match=rf"holds {number} at index \[0,1\], outside the range"):
                    client.infer("decoder", {"ids": np.array([[0, number]])})
        check_answers(service)
        assert service.count("ingot_engine_restarts_total", model="decoder") == 0


@pytest.mark.matrix
def test_a_plan_of_the_model_is_taken(run_ingot: RunIngot, tmp_path: Path) -> None:
    out = tmp_path / "planned.ingot"
    given = ("--input", INPUT, "--to", "pt2", "--tensor-parallel", "auto", "--out", str(out))
    result = run_ingot("export", "tests.export.decoders:planned", *given)
    assert result.returncode == 0, result.stderr
    assert (
        "every process of --shards holds all weights of norm (sequence_parallel), experts.* (rowwise)" in result.stderr
    )
    plan = json.loads(run_ingot("inspect", str(out), "--json").stdout)["variants"][0]["tensor_parallel"]
    assert plan == PLAN


def test_the_export_notes_how_much_a_plan_divides() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))  # 76 parameters
    notes: list[str] = []
    plan_of(net, {"0": "colwise"}, notes.append)
    assert notes[0].startswith("the tensor-parallel plan divides 1 of 2 layers, 42% of the weights")


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (
            {"layers.*.upp": "colwise"},
            r"'layers\.\*\.upp' of the .* plan names no module .* layers\.0\.up,",
        ),
        ({"layers.*.norms.*": "colwise"}, "names LayerNorm, which cannot be divided"),
        ({"layers.*.up": "columns"}, r"'columns' of layers\.\*\.up is not a style .* use colwise or rowwise"),
        ({}, "the tensor-parallel plan is empty"),
        ([], "is not an object of modules and styles"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(run_ingot: RunIngot, tmp_path: Path, plan: Any, fault: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    given = ("--input", INPUT, "--to", "pt2", "--tensor-parallel", str(tmp_path / "plan.json"))
    result = run_ingot("export", MODEL, *given, "--out", str(tmp_path / "x.ingot"))
    assert result.returncode == 1
    assert re.search(fault, result.stderr.replace("\n", " ")), result.stderr


def test_a_model_without_a_plan_and_other_targets_have_none(run_ingot: RunIngot, tmp_path: Path) -> None:
    for options, fault in (
        (("--to", "pt2", "--tensor-parallel", "auto"), "Decoder lacks a tensor-parallel plan, tp_plan or _tp_plan"),
        (("--tensor-parallel", "auto"), "give --to pt2"),
        (("--to", "pt2", "--tensor-parallel", str(tmp_path / "none.json")), "cannot be read: No such file"),
    ):
        result = run_ingot("export", MODEL, "--input", INPUT, *options, "--out", str(tmp_path / "x.ingot"))
        assert result.returncode == 1
        assert fault in result.stderr.replace("\n", " ")
