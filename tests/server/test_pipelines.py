"""Pipelines: models that read each other's outputs, served as one model over each protocol."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import ingot
from ingot import AsyncClient, Client, RunningServer
from ingot.errors import (
    AlreadyExists,
    DeadlineExceeded,
    IngotError,
    InvalidArgument,
    InvalidConfig,
    NotFound,
    TooLarge,
    Unavailable,
)
from ingot.model_store.format import goldens
from ingot.serving.pipelines.values import Level, Value, gathered, scattered, stacked
from ingot.tensors import Array
from tests import onnx_models
from tests.server import test_image_steps, test_steps
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.server.test_observation import PARENT
from tests.server.test_observation import collector as collector
from tests.server.test_python_models import engine_processes
from tests.support import RunIngot, succeeded

SUM = """
[pipelines.sum]
inputs = ["x"]
outputs = { y = "add.y", z = "first.z" }
[pipelines.sum.nodes.first]
model = "affine"
inputs = { x = "x" }
[pipelines.sum.nodes.add]
model = "pair"
inputs = { a = "first.y", b = "first.z" }
"""
CHOICE = """
[pipelines.choice]
inputs = ["x"]
outputs = { y = ["low.y", "high.z"], low = "low.y" }
[pipelines.choice.nodes.low]
model = "affine"
inputs = { x = "x" }
when = { value = "x", below = 10 }
[pipelines.choice.nodes.high]
model = "affine"
inputs = { x = "x" }
when = [{ value = "x", above = 0 }, { value = "x", above = 99 }]
"""
COLUMNS = """
[pipelines.columns]
inputs = ["xs"]
outputs = { y = "one.y" }
[pipelines.columns.nodes.one]
model = "affine"
each = "x"
inputs = { x = "xs" }
"""
PARTS = """
[pipelines.parts]
inputs = ["image", "box", "count"]
outputs = { colour = "colour.label", turned = "again.label" }
[pipelines.parts.nodes.part]
step = "crop"
each = "box"
count = "count"
inputs = { image = "image", box = "box" }
[pipelines.parts.nodes.colour]
model = "colour"
inputs = { image = "part.image" }
[pipelines.parts.nodes.turn]
step = "rotate"
degrees = 90
when = { value = "colour.label", equals = "red" }
inputs = { image = "part.image" }
[pipelines.parts.nodes.again]
model = "colour"
inputs = { image = "turn.image" }
"""
PICTURES = """
[pipelines.pictures]
inputs = ["image"]
outputs = { label = "colour.label", score = "colour.score", length = "length.label" }
[pipelines.pictures.nodes.colour]
model = "colour"
inputs = { image = "image" }
[pipelines.pictures.nodes.length]
model = "length"
each = "text"
inputs = { text = "colour.label" }
"""
TEXTS = """
[pipelines.words]
inputs = ["sentence"]
outputs = { label = "length.label", score = "length.score" }
[pipelines.words.nodes.length]
model = "length"
inputs = { text = "sentence" }
"""


def serve(folder: Path, text: str, *sources: Path | str, **settings: Any) -> RunningServer:
    (folder / "ingot.toml").write_text(text)
    return ingot.serve(*sources, config=folder / "ingot.toml", http_port=0, grpc_port=0, device="cpu", **settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("pipelines")
    models = onnx_models.affine(folder), onnx_models.pair(folder)
    with serve(folder, SUM + CHOICE + COLUMNS, *models) as running:
        yield running


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("pictures")
    test_image_steps.make(folder).save(folder / "colour.ingot")
    test_steps.make(folder).save(folder / "length.ingot")
    with serve(folder, PARTS + PICTURES + TEXTS, folder / "colour.ingot", folder / "length.ingot") as running:
        yield running


def infer(server: RunningServer, name: str, timeout: float | None = None, **inputs: Any) -> dict[str, Array]:
    parameters = None if timeout is None else {"timeout": int(timeout * 1e6)}
    return server.infer(name, inputs, parameters=parameters)


def statistics(server: RunningServer, name: str) -> Any:
    url = f"{server.http_url}/v2/models/{name}/stats"
    return httpx.get(url, trust_env=False).raise_for_status().json()["model_stats"][0]


X = np.array([[1, 2, 3], [40, 50, 60]], np.float32)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_graph_of_models_answers_over_each_protocol(server: RunningServer, protocol: str) -> None:
    with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
        assert client.ready("sum")
        metadata = client.metadata("sum")
        assert metadata["platform"] == "ingot_pipeline"
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
        assert [(spec["name"], spec["shape"]) for spec in metadata["outputs"]] == [("y", [-1, -1]), ("z", [-1, 3])]
        outputs = client.infer("sum", {"x": X})
        assert outputs["y"].tolist() == (X + 1).tolist()
        assert outputs["z"].tolist() == (-X).tolist()
        assert [*client.infer("sum", {"x": X}, outputs=["z"])] == ["z"]


def test_the_command_line_asks_it(server: RunningServer, run_ingot: RunIngot) -> None:
    found = succeeded(run_ingot("infer", server.http_url, "sum", "--input", "x=[[1, 2, 3]]", "--json"))
    assert '"y"' in found


def test_conditions_choose_rows_and_merge_their_values(server: RunningServer) -> None:
    outputs = infer(server, "choice", x=np.array([[1, 0, 0], [200, 1, 1], [50, 9, 9]], np.float32))
    assert outputs["y"].tolist() == [[3, 1, 1], [-200, -1, -1], [0, 0, 0]]
    assert outputs["low"].tolist() == [[3, 1, 1], [0, 0, 0], [0, 0, 0]]
    nothing = infer(server, "choice", x=np.array([[50, 0, 0]], np.float32))
    assert nothing["y"].tolist() == [[0, 0, 0]]


def test_each_column_is_an_item(server: RunningServer) -> None:
    xs = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    assert infer(server, "columns", xs=xs)["y"].tolist() == (2 * xs + 1).tolist()
    assert infer(server, "columns", xs=xs[:, :0])["y"].shape == (2, 0, 3)


def test_the_time_of_each_node_is_counted(server: RunningServer) -> None:
    before = statistics(server, "sum")
    infer(server, "sum", x=X)
    after = statistics(server, "sum")
    nodes, earlier = after["ingot"]["nodes"], before["ingot"]["nodes"]
    for name in ("first", "add"):
        assert nodes[name]["count"] == earlier[name]["count"] + 1
        assert nodes[name]["items"] == earlier[name]["items"] + 2
        assert nodes[name]["ns"] > earlier[name]["ns"]
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    assert after["inference_count"] == before["inference_count"] + 2
    metrics = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    assert 'ingot_pipeline_node_seconds_count{model="sum",node="add",version="1"}' in metrics
    assert 'ingot_model_ready{model="sum",version="1"} 1.0' in metrics
    assert 'ingot_requests_total{code="ok",model="sum",protocol="python",version="1"}' in metrics


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": X.astype(np.float64)}, "input 'x' has datatype FP64"),
        ({"y": X}, "unknown input 'y'"),
        ({"x": X[:, :2]}, "dimension 1 of input 'x' is 2, the model takes 3"),
        ({"x": X[:0]}, "dimension 0 \\('rows'\\) of input 'x' is 0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(server: RunningServer, inputs: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        infer(server, "sum", **inputs)


def bitmap(*colours: str) -> bytes:
    """Return a picture with vertical stripes of 20 pixels."""
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (20 * len(colours), 10))
    for index, colour in enumerate(colours):
        picture.paste(colour, (20 * index, 0, 20 * index + 20, 10))
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def objects(*items: bytes) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def test_parts_of_pictures_are_items_that_models_read(pictures: RunningServer) -> None:
    stripes = [[20 * index, 0, 20 * index + 20, 10] for index in range(3)]
    outputs = infer(
        pictures,
        "parts",
        image=objects(bitmap("red", "blue", "lime"), bitmap("blue"), bitmap("red")),
        box=np.array([stripes, stripes, stripes], np.float32),
        count=np.array([3, 1, 0], np.int32),
    )
    best = outputs["colour"][..., 0].tolist()
    assert best == [[b"red", b"blue", b"green"], [b"blue", b"", b""], [b"", b"", b""]]
    assert outputs["turned"][..., 0].tolist() == [[b"red", b"", b""], [b""] * 3, [b""] * 3]
    assert statistics(pictures, "parts")["ingot"]["nodes"]["turn"]["items"] == 1
    none: dict[str, Any] = {
        "image": objects(bitmap("red")),
        "box": np.zeros((1, 0, 4), np.float32),
        "count": np.zeros(1, np.int32),
    }
    outputs = infer(pictures, "parts", **none)
    assert {name: array.shape for name, array in outputs.items()} == {"colour": (1, 0, 3), "turned": (1, 0, 3)}


def test_a_process_that_decodes_is_started_again(pictures: RunningServer) -> None:
    request = {
        "image": objects(bitmap("red")),
        "box": np.array([[[0, 0, 20, 10]]], np.float32),
        "count": np.ones(1, np.int32),
    }
    expected = infer(pictures, "parts", None, **request)["colour"].tolist()
    for process in engine_processes():
        os.kill(process, signal.SIGKILL)

    def answers() -> bool:
        with contextlib.suppress(Unavailable):
            return bool(infer(pictures, "parts", None, **request)["colour"].tolist() == expected)
        return False

    wait_until(answers)


def test_what_items_repeat_and_pad_is_bounded() -> None:
    level = Level.of_counts(Level(1 << 14), np.eye(1, 1 << 14, dtype=np.intp)[0] * (1 << 14))
    with pytest.raises(TooLarge, match="an output of 16384 rows with up to 16384 items has 1 GiB"):
        gathered(Value(np.zeros(1 << 14, np.float32)), level)
    large = np.zeros((1, 1 << 20), np.float32)
    with pytest.raises(TooLarge, match="a value that 10000 items read has 39"):
        Value(large).at(np.zeros(10000, np.intp))
    with pytest.raises(TooLarge, match="an output for 10000 items has 39"):
        scattered(large, np.zeros(1, np.intp), 10000)
    with pytest.raises(TooLarge, match="an output for 10000 items has 39"):
        stacked([large, *[np.zeros((1, 1), np.float32)] * 9999])


def test_a_failed_item_names_its_node_and_itself(pictures: RunningServer) -> None:
    with pytest.raises(InvalidArgument, match=r"node 'colour': element 1 of input 'image' is not a JPEG"):
        infer(pictures, "pictures", image=objects(bitmap("red"), b"no picture"))
    with pytest.raises(InvalidArgument, match=r"node 'part': element 0 of input 'image' is not a JPEG"):
        infer(
            pictures,
            "parts",
            image=objects(b"no picture"),
            box=np.zeros((1, 1, 4), np.float32),
            count=np.ones(1, np.int32),
        )
    with pytest.raises(InvalidArgument, match=r"node 'part': 'count' counts 2 items, but 'box' has 1"):
        infer(
            pictures,
            "parts",
            image=objects(bitmap("red")),
            box=np.zeros((1, 1, 4), np.float32),
            count=np.array([2], np.int32),
        )


def test_files_are_answered_at_the_models_address(pictures: RunningServer) -> None:
    url = f"{pictures.http_url}/models/pictures"
    answer = httpx.post(url, content=bitmap("blue"), headers={"Content-Type": "image/png"}, trust_env=False)
    assert answer.raise_for_status().json()[0]["label"] == "blue"


def test_texts_are_answered_at_the_models_address(pictures: RunningServer, run_ingot: RunIngot) -> None:
    url = f"{pictures.http_url}/models/words"
    answer = httpx.post(url, json={"inputs": "a fine film"}, trust_env=False).json()
    assert "error" not in answer, answer
    assert [each["label"] for each in answer[0]] == ["LONG", "SHORT"]
    wrong = httpx.post(url, json={"inputs": 3}, trust_env=False)
    assert wrong.status_code == 400
    found = succeeded(run_ingot("infer", pictures.http_url, "words", "--input", "sentence=a fine film"))
    assert found.startswith("  LONG 0.")


@pytest.mark.source  # the gate's time counts, as Worker.run cannot be replaced
def test_a_node_waits_in_the_queue_of_its_model(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(gate.path, monkeypatch.setattr)
    models = onnx_models.affine(tmp_path), onnx_models.held(tmp_path)
    text = SUM.replace('"pair"', '"held"').replace('a = "first.y", b = "first.z"', 'x = "first.y"')
    with serve(tmp_path, text, *models) as server, ThreadPoolExecutor(8) as threads:
        gate.shut()
        blocking = threads.submit(infer, server, "held", x=X)
        wait_until(gate.waited_at)
        asked = [threads.submit(infer, server, "sum", x=X) for _ in range(4)]
        wait_until(lambda: 'queued_requests{model="held",version="1"} 4.0' in _metrics(server))
        _deadline_and_cancellation(server)
        gate.open()
        assert all(each.result()["y"].tolist() == (2 * X + 2).tolist() for each in (*asked,))
        blocking.result()
        sizes = {each["batch_size"] for each in statistics(server, "held")["batch_stats"]}
        assert 8 in sizes  # the rows of all four


def _deadline_and_cancellation(server: RunningServer) -> None:
    with pytest.raises(DeadlineExceeded, match="'add'"):
        infer(server, "sum", 0.2, x=X)

    async def leave() -> None:
        async with AsyncClient(server.http_url) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.infer("sum", {"x": X}), 0.3)

    asyncio.run(leave())
    wait_until(lambda: 'queued_requests{model="held",version="1"} 4.0' in _metrics(server))
    wait_until(lambda: 'in_flight_requests{model="sum",version="1"} 4.0' in _metrics(server))


def _metrics(server: RunningServer) -> str:
    return httpx.get(f"{server.http_url}/metrics", trust_env=False).text


@pytest.mark.matrix
def test_a_trace_has_a_span_for_each_node(tmp_path: Path, collector: tuple[str, list[Span]]) -> None:
    endpoint, spans = collector
    models = onnx_models.affine(tmp_path), onnx_models.pair(tmp_path)
    with serve(tmp_path, SUM, *models, otlp=endpoint, replica="blue-3") as server:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1.0, 2.0, 3.0]}]}
        url = f"{server.http_url}/v2/models/sum/infer"
        httpx.post(url, json=body, headers={"traceparent": PARENT}, trust_env=False).raise_for_status()
    [whole] = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    nodes = {span.name: span for span in spans if span.parent_span_id == whole.span_id}
    first, add = nodes["node first"], nodes["node add"]
    assert whole.name == "infer sum"
    assert first.trace_id == whole.trace_id
    assert first.end_time_unix_nano <= add.start_time_unix_nano <= add.end_time_unix_nano <= whole.end_time_unix_nano


def test_another_version_of_a_model_answers_next(tmp_path: Path) -> None:
    affine, pair = onnx_models.affine(tmp_path), onnx_models.pair(tmp_path)
    with serve(tmp_path, SUM, affine, pair) as server:
        assert infer(server, "sum", x=X)["y"].tolist() == (X + 1).tolist()
        shutil.copy(_negated(tmp_path), affine)
        assert [each.result for each in server.reload("affine")] == ["ok"]
        assert infer(server, "sum", x=X)["y"].tolist() == (X - 1).tolist()


def _negated(folder: Path) -> Path:
    """Return the path of a model like affine with y = 2 x - 1."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(folder / "affine.onnx")
    [one] = [each for each in model.graph.initializer if each.name == "one"]
    one.CopyFrom(numpy_helper.from_array(np.array(-1, np.float32), "one"))
    onnx.save(model, folder / "other.onnx")
    return folder / "other.onnx"


def test_a_missing_model_makes_it_unready_and_is_named(tmp_path: Path) -> None:
    affine, pair = onnx_models.affine(tmp_path), onnx_models.pair(tmp_path)
    with serve(tmp_path, SUM, affine, pair) as server, Client(server.http_url) as client:

        def call(work: Callable[[], Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(work(), server.loop).result()

        call(lambda: server.rollouts.unload("pair"))
        assert not client.ready("sum")
        assert client.ready()  # its models are still served
        with pytest.raises(Unavailable, match=r"node 'add' cannot use model 'pair'.*is not found"):
            infer(server, "sum", x=X)
        [failure] = call(server.rollouts.reload).failures
        assert "needs model 'pair', which is unloaded; load it with ingot server load pair" in failure
        call(lambda: server.rollouts.load("pair"))
        assert client.ready("sum")
        assert infer(server, "sum", x=X)["y"].tolist() == (X + 1).tolist()
        with pytest.raises(AlreadyExists, match="'sum' is the name of a pipeline"):
            call(lambda: server.rollouts.load(f"sum={pair}"))


def test_a_reload_changes_pipelines_of_the_file(tmp_path: Path) -> None:
    affine, pair = onnx_models.affine(tmp_path), onnx_models.pair(tmp_path)
    with serve(tmp_path, SUM, affine, pair) as server:

        def reload(text: str) -> list[str]:
            (tmp_path / "ingot.toml").write_text(text)
            done = asyncio.run_coroutine_threadsafe(server.rollouts.reload(), server.loop).result()
            return [*done.changes, *done.failures]

        assert reload(COLUMNS + SUM.replace('y = "add.y"', 'sum = "add.y"')) == [
            "live: change pipeline sum",
            "live: load pipeline columns",
        ]
        assert infer(server, "sum", x=X)["sum"].tolist() == (X + 1).tolist()
        assert infer(server, "columns", xs=X[None])["y"].tolist() == [(2 * X + 1).tolist()]
        [_, failure] = reload(SUM.replace("first.y", "first.yy"))[-2:]
        assert "the pipelines stay as they are" in failure
        assert "node 'first' has no output 'yy'; it has: y, z" in failure
        assert infer(server, "columns", xs=X[None])["y"].shape == (1, 2, 3)
        assert reload("") == ["live: unload pipeline columns", "live: unload pipeline sum"]
        with pytest.raises(NotFound):
            infer(server, "sum", x=X)


def test_a_changed_pipeline_keeps_its_metrics(tmp_path: Path) -> None:
    affine, pair = onnx_models.affine(tmp_path), onnx_models.pair(tmp_path)
    with serve(tmp_path, SUM, affine, pair) as server:
        infer(server, "sum", x=X)
        old = weakref.ref(server.rollouts.repository.get("sum"))
        (tmp_path / "ingot.toml").write_text(SUM.replace('y = "add.y"', 'sum = "add.y"'))
        asyncio.run_coroutine_threadsafe(server.rollouts.reload(), server.loop).result()
        infer(server, "sum", x=X)
        metrics = _metrics(server)
        assert 'ingot_pipeline_node_seconds_count{model="sum",node="add",version="1"} 2.0' in metrics
        assert 'ingot_requests_total{code="ok",model="sum",protocol="python",version="1"} 2.0' in metrics
        assert 'ingot_model_ready{model="sum",version="1"} 1.0' in metrics
        gc.collect()
        assert old() is None
        (tmp_path / "ingot.toml").write_text("")
        asyncio.run_coroutine_threadsafe(server.rollouts.reload(), server.loop).result()
        assert 'model="sum"' not in _metrics(server)


WRONG = {
    'a = "first.y"': ('a = "first.q"', "node 'add' input 'a' reads 'first.q', but node 'first' has no output 'q'"),
    'model = "pair"': ('model = "pear"', "node 'add' of pipeline 'sum' needs model 'pear', which is not served"),
    "[pipelines.sum]": ("[pipelines.affine]", "'affine' is also the name of a model; rename one"),
    'b = "first.z"': ('c = "first.z"', "sets input 'c' of model 'pair', which has none"),
    ', b = "first.z"': ("", "lacks the input 'b' of model 'pair'; add it to its inputs"),
    '"add.y"': ('"add.x"', "output 'y' reads 'add.x', but node 'add' has no output 'x'; it has: y"),
    'inputs = { x = "x" }': (
        'inputs = { x = "x" }\nwhen = { value = "x", equals = "a" }',
        "when is string, but 'x' is x:float32[rows,3]",
    ),
}


@pytest.mark.parametrize("before", WRONG)
def test_what_does_not_fit_is_named_before_the_server_is_ready(before: str, tmp_path: Path) -> None:
    after, message = WRONG[before]
    text = SUM.replace(before, after)
    text = text.replace("pipelines.sum.", "pipelines.affine.") if "pipelines.affine" in after else text
    with pytest.raises(InvalidConfig) as caught:
        serve(tmp_path, text, onnx_models.affine(tmp_path), onnx_models.pair(tmp_path))
    assert message in str(caught.value)
    assert "ingot.toml:" in str(caught.value)


def test_models_of_other_types_and_without_a_batch_are_refused(tmp_path: Path) -> None:
    models = onnx_models.affine(tmp_path), onnx_models.quotient(tmp_path), onnx_models.reshaped(tmp_path)
    typed = SUM.replace('"pair"', '"quotient"').replace('a = "first.y", b = "first.z"', 'x = "first.y", d = "first.z"')
    with pytest.raises(InvalidConfig, match=r"input 'x' is x:int64\[batch,2\], but 'first.y' is y:float32\[batch,3\]"):
        serve(tmp_path, typed, *models)


def test_an_error_of_one_node_cancels_the_others(tmp_path: Path) -> None:
    text = """
[pipelines.parts]
inputs = ["x", "d"]
outputs = { y = "part.y" }
[pipelines.parts.nodes.part]
model = "quotient"
each = ["x"]
inputs = { x = "x", d = "d" }
"""
    with serve(tmp_path, text, onnx_models.quotient(tmp_path)) as server:
        numbers = np.array([[[4, 6], [8, 10]]])
        assert infer(server, "parts", x=numbers, d=np.array([[2, 2]]))["y"].tolist() == [[[2, 3], [4, 5]]]
        with pytest.raises(IngotError, match="node 'part'"):
            infer(server, "parts", x=numbers, d=np.array([[0, 2]]))


def test_goldens_are_recorded_and_replayed(tmp_path: Path) -> None:
    """A model that answers otherwise makes the pipeline unready, with the node named, until it answers as before."""
    models = [str(path) for path in (onnx_models.affine(tmp_path), onnx_models.pair(tmp_path))]
    with serve(tmp_path, SUM, *models, record=tmp_path / "traffic", record_share=1) as running:
        expected = infer(running, "sum", x=X)
    golden = tmp_path / "traffic/sum/1/000000.safetensors"
    [case] = goldens.decode(golden.read_bytes())
    assert sorted(case.outputs) == ["add.y", "first.y", "first.z"]
    assert {name: array.tolist() for name, array in case.answers.items()} == {
        name: array.tolist() for name, array in expected.items()
    }
    shutil.copy(golden, tmp_path / "sum.safetensors")
    text = SUM.replace('inputs = ["x"]', 'goldens = "sum.safetensors"\ninputs = ["x"]', 1)
    with serve(tmp_path, text, *models) as running, Client(running.http_url) as client:
        assert client.ready("sum")
        assert statistics(running, "sum")["ingot"]["nodes"]["first"]["count"] == 0
        assert infer(running, "sum", x=X)["y"].tolist() == expected["y"].tolist()
    wrong = dataclasses.replace(case, outputs={**case.outputs, "first.z": case.outputs["first.z"] * 2})
    (tmp_path / "sum.safetensors").write_bytes(goldens.encode([case, wrong]))
    with serve(tmp_path, text, *models) as running, Client(running.http_url) as client:
        assert not client.ready("sum")
        with pytest.raises(Unavailable, match="golden case 1: node 'first' answers otherwise: 'z' departs by"):
            infer(running, "sum", x=X)
        shutil.copy(golden, tmp_path / "sum.safetensors")
        asyncio.run_coroutine_threadsafe(running.rollouts.reload(), running.loop).result()
        assert client.ready("sum")


def test_goldens_are_replayed_when_a_model_changes(tmp_path: Path) -> None:
    shutil.copy(onnx_models.affine(tmp_path), tmp_path / "first.onnx")
    sources = f"first={tmp_path / 'first.onnx'}", str(onnx_models.pair(tmp_path))
    text = SUM.replace('"affine"', '"first"')
    with serve(tmp_path, text, *sources, record=tmp_path / "traffic", record_share=1) as running:
        infer(running, "sum", x=X)
    text = text.replace('inputs = ["x"]', 'goldens = "traffic/sum/1/000000.safetensors"\ninputs = ["x"]', 1)
    with serve(tmp_path, text, *sources) as running, Client(running.http_url) as client:
        assert client.ready("sum")
        shutil.copy(_negated(tmp_path), tmp_path / "first.onnx")
        assert [each.result for each in running.reload("first")] == ["ok"]
        wait_until(lambda: not client.ready("sum"))
        with pytest.raises(Unavailable, match="node 'first' answers otherwise"):
            infer(running, "sum", x=X)


def test_goldens_that_do_not_exist_or_fit(tmp_path: Path) -> None:
    models = onnx_models.affine(tmp_path), onnx_models.pair(tmp_path)
    text = SUM.replace('inputs = ["x"]', 'goldens = "sum.safetensors"\ninputs = ["x"]', 1)
    with pytest.raises(InvalidConfig, match=r"ingot.toml:3: pipeline 'sum': .*sum.safetensors"):
        serve(tmp_path, text, *models)
    (tmp_path / "sum.safetensors").write_bytes(b"?")
    with pytest.raises(InvalidConfig, match=r"ingot.toml:3: pipeline 'sum': the goldens cannot be read"):
        serve(tmp_path, text, *models)
    (tmp_path / "sum.safetensors").write_bytes(goldens.encode([]))
    with pytest.raises(InvalidConfig, match=r"sum.safetensors has no recorded requests"):
        serve(tmp_path, text, *models)
    (tmp_path / "sum.safetensors").write_bytes(goldens.encode([goldens.Golden({}, {}, {"a": X}, {"y": X})]))
    with (
        serve(tmp_path, text, *models) as running,
        pytest.raises(Unavailable, match="golden case 0: unknown input 'a'"),
    ):
        infer(running, "sum", x=X)
