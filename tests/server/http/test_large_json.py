"""Large JSON requests: the same answers as small ones, no objects beyond the declared shape, no delay of others."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import orjson
import pytest

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument, Unavailable
from ingot.protocol import json_codec, json_data, json_large
from ingot.server.http.exchange import OPEN_INFERENCE, Service, begin
from ingot.server.http.json_memo import Decoder
from ingot.server.http.parser import InferHead
from ingot.server.net import compression
from ingot.server.net.limits import Budget
from ingot.server.plane.dataplane import DataPlane
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.server.outside import wait_until

PATH = "/v2/models/affine/infer"
SMALL = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
COUNT = 30_000
BOMB = b"[]," * 300_000 + b"[]"


def tensor(data: str, shape: list[int], datatype: str = "FP32", name: str = "x") -> str:
    return f'{{"name": "{name}", "datatype": "{datatype}", "shape": {shape}, "data": {data}}}'


def body(*tensors: str, rest: str = "") -> bytes:
    return f'{{"inputs": [{", ".join(tensors)}]{rest}}}'.encode()


def decoded(raw: bytes, loads: Callable[[Any], Any]) -> dict[str, Array] | str:
    """Return the inputs, or the error's text."""
    try:
        return dict(json_codec.decode_request("m", "", raw, None, loads)[0].inputs)
    except InvalidArgument as error:
        return str(error)


def nested(values: Any, *shape: int) -> str:
    return json.dumps(np.array(values).reshape(shape).tolist())


FLOATS = np.random.default_rng(0).standard_normal(COUNT).tolist()
INTS = list(range(COUNT))


@pytest.mark.parametrize(
    "raw",
    [
        body(tensor(nested(FLOATS, COUNT), [COUNT])),
        body(tensor(nested(FLOATS, COUNT), [1, COUNT])),
        body(tensor(nested(FLOATS, 1, COUNT), [1, COUNT])),
        body(tensor(nested(FLOATS, COUNT, 1), [COUNT, 1])),
        body(tensor(nested(FLOATS, 10, 3, COUNT // 30), [10, 3, COUNT // 30])),
        body(tensor(nested(FLOATS, 10, 3, COUNT // 30), [COUNT])),
        body(tensor(nested(FLOATS, 1, COUNT), [COUNT])),
        body(tensor(nested(INTS, COUNT), [COUNT])),
        body(tensor(nested(INTS, 3, COUNT // 3), [3, COUNT // 3], "INT16")),
        body(tensor(json.dumps([True, False] * COUNT), [2 * COUNT], "BOOL")),
        body(tensor(json.dumps(["[,]", '{"data": [1]}'] * COUNT), [2 * COUNT], "BYTES")),
        body(tensor(nested(FLOATS, COUNT), [COUNT]), tensor(nested(INTS, COUNT), [COUNT], "INT64", "y")),
        body(tensor(nested(INTS, COUNT), [COUNT]), rest=', "parameters": {"data": [1, 2]}, "id": "a"'),
        body(tensor(nested(INTS, COUNT).replace(", ", " ,\n\t"), [COUNT])),
        body(tensor(f'[1, 2], "data": {nested(INTS, COUNT)}', [COUNT])),
        body(tensor(nested(INTS, COUNT), [COUNT]), rest=f', "parameters": {{"data": {nested(INTS, COUNT)}}}'),
        body(tensor("[" + " " * 40_000 + "]", [0])),
        body(tensor(json.dumps([[]] * COUNT), [COUNT, 0])),
        # Short numbers without blanks between them.
        body(tensor(nested([1] * COUNT, 100, COUNT // 100).replace(" ", ""), [100, COUNT // 100])),
        body(tensor(nested([1] * COUNT, COUNT).replace(" ", "").replace("[", "[\n  "), [COUNT], "UINT8")),
    ],
)
def test_it_is_what_a_small_one_would_be(raw: bytes) -> None:
    alike, found = decoded(raw, orjson.loads), decoded(raw, json_large.loads)
    assert isinstance(alike, dict), alike
    assert isinstance(found, dict), found
    assert found.keys() == alike.keys()
    for name, array in found.items():
        assert array.dtype == alike[name].dtype
        np.testing.assert_array_equal(array, alike[name], strict=True)


@pytest.mark.parametrize("row", ["1[,2]", "[1,2"])
def test_brackets_must_stand_where_lists_begin_and_end(row: str) -> None:
    raw = body(tensor(f"[{','.join([row] * COUNT)}]", [COUNT, 2]))
    for found in (decoded(raw, json_large.loads), decoded(raw, orjson.loads)):
        assert isinstance(found, str)
        assert "JSON" in found


WRONG: dict[str, tuple[str, str]] = {
    "too many": (json.dumps([1] * (COUNT + 1)), f"has {COUNT + 1} values"),
    "too few": (json.dumps([1] * (COUNT - 1)), f"has {COUNT - 1} values"),
    "a fraction": (json.dumps([1] * (COUNT - 1) + [1.5]), "holds 1.5"),
    "out of range": (json.dumps([1] * (COUNT - 1) + [1 << 40]), "out of its range"),
    "a truth value": (json.dumps([1] * (COUNT - 1) + [True]), "holds booleans"),
    "null": (json.dumps([1] * (COUNT - 1) + [None]), "something other than numbers"),
    "ragged": (json.dumps([[1] * 7, [1] * (COUNT - 7)]), "ragged"),
    "ragged by as many lists": (json.dumps([[1] * 7] + [[1] * 6] + [[1] * ((COUNT - 13) // 9)] * 9), "values"),
    "a number between lists": (nested([1] * COUNT, 10, COUNT // 10).replace("],", "]9,", 1), "not valid JSON"),
    "two numbers": (json.dumps([1] * COUNT).replace(", ", " 7, ", 1), "not valid JSON"),
    "a hole": (json.dumps([1] * COUNT).replace("1, ", ", ", 1), "not valid JSON"),
    "a wide hole": ("[" + " " * 40_000 + json.dumps([1] * COUNT).replace("[1", "", 1), "not valid JSON"),
    "a comma at the end": (json.dumps([1] * (COUNT - 1))[:-1] + ",]", "not valid JSON"),
    "no end": (json.dumps([1] * COUNT)[:-1], "not valid JSON"),
    "an end too many": (json.dumps([1] * COUNT) + "]", "not valid JSON"),
    "a text among lists": (json.dumps([[1] * COUNT, ["a"]]), "ragged"),
    "a text in the last list": (json.dumps([[1] * (COUNT // 2), [1] * (COUNT // 2 - 1) + ["a"]]), "other than numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_requests_are_refused(case: str) -> None:
    data, says = WRONG[case]
    shape = [10, COUNT // 10] if "between lists" in case else [COUNT]
    found = decoded(body(tensor(data, shape, "INT32")), json_large.loads)
    assert isinstance(found, str)
    assert isinstance(decoded(body(tensor(data, shape, "INT32")), orjson.loads), str)
    assert says in found or "values, but shape" in found


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (body(tensor(f"[{BOMB.decode()}]", [1, 3])), "has 300001 values, but shape"),
        (body(tensor(f"[{BOMB.decode()}]", [300_001])), "takes 300001"),
        (body(tensor(f"[{'[],' * 2_000_000}[]]", [2_000_001])), "send it flat"),
        (body(json.dumps(SMALL["inputs"][0]), rest=f', "parameters": {{"a": [{"[]," * 2_000_000}[]]}}'), "1,048,576"),
        (body(json.dumps(SMALL["inputs"][0]), rest=f', "parameters": [{"{}," * 2_000_000}[]]'), "1,048,576"),
        (body(tensor(json.dumps([""] * 2_000_000), [2_000_000], "BYTES")), "as binary data"),
    ],
)
def test_no_objects_are_made_of_excess_values(raw: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    class Counting:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(text: bytes) -> Any:
            parsed.append(len(text))
            return orjson.loads(text)

    monkeypatch.setattr(json_large, "orjson", Counting)
    found = decoded(raw, json_large.loads)
    assert isinstance(found, str)
    assert says in found or "has 1 values" in found or "has 0 values" in found, found
    assert max(parsed, default=0) <= 1 << 20


class Searched(bytes):
    """Counts the bytes that are searched through."""

    bytes_searched = 0

    def find(self, part: bytes, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        end = len(self) if end is None else end
        found = super().find(part, start, end)
        self.bytes_searched += (end if found < 0 else found) - start
        return found

    def rfind(self, part: bytes, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        end = len(self) if end is None else end
        found = super().rfind(part, start, end)
        self.bytes_searched += end - max(found, start)
        return found


@pytest.mark.parametrize("unit", [b'"data":[', b'"data":[1]', b'"data":[}', b'"data":[]}', b'{"data":[', b'"data":'])
def test_no_part_of_a_text_is_searched_for_each_key(unit: bytes) -> None:
    text = Searched(unit * 5000)
    assert not list(json_large._long_lists(text))
    assert 0 < text.bytes_searched <= 5 * len(text)


def test_a_bomb_of_a_few_bytes_is_refused(server: RunningServer) -> None:
    raw = gzip.compress(body(tensor(f"[{BOMB.decode()}]", [1, 3])))
    assert len(raw) < 4096
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
        answer = client.post(PATH, content=raw, headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]) == (
        400,
        "tensor 'x' has 300001 values, but shape [1, 3] takes 3",
    )


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Large JSON is not decoded before the second event is set; the first says that one has begun."""
    begun, go = threading.Event(), threading.Event()
    loads: Callable[[bytes], Any] = json_large.loads

    def wait(raw: bytes) -> Any:
        begun.set()
        assert go.wait(60)
        return loads(raw)

    monkeypatch.setattr(json_large, "loads", wait)
    return begun, go


def large_request() -> bytes:
    return body(tensor(nested(FLOATS, COUNT // 3, 3), [COUNT // 3, 3]))


def test_others_are_answered_while_it_is_decoded(folder: Path, slowly: tuple[threading.Event, threading.Event]) -> None:
    begun, go = slowly
    answers: list[httpx.Response] = []
    with ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0) as server:

        def ask() -> None:
            answers.append(httpx.post(server.http_url + PATH, content=large_request(), trust_env=False, timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(60)
        small = httpx.post(server.http_url + PATH, json=SMALL, trust_env=False, timeout=60)
        assert small.json()["outputs"][0]["data"] == [3, 5, 7]
        assert not answers
        go.set()
        asking.join(60)
    np.testing.assert_allclose(answers[0].json()["outputs"][0]["data"], 2 * np.array(FLOATS) + 1, 1e-5, 1e-5)


@pytest.mark.source  # patches Budget.keep
@pytest.mark.matrix
def test_a_client_that_leaves_meanwhile_is_forgotten_once_its_body_is_decoded(
    folder: Path, slowly: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = slowly
    left = threading.Event()
    keep = Budget.keep

    def kept(budget: Budget, size: int) -> None:
        keep(budget, size)
        left.set()

    monkeypatch.setattr(Budget, "keep", kept)
    with ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0, max_bodies_mb=1) as server:
        with (
            httpx.Client(base_url=server.http_url, trust_env=False, timeout=0.01) as leaving,
            pytest.raises(httpx.ReadTimeout),
        ):
            leaving.post(PATH, content=large_request(), timeout=httpx.Timeout(60, read=0.01))
        assert begun.wait(60)
        assert left.wait(60)
        x = np.ones((80_000, 3), np.float32)  # which takes all of the budget

        def answered() -> bool:
            with ingot.Client(server.http_url) as client:
                try:
                    return client.infer("affine", {"x": x})["y"].shape == x.shape
                except Unavailable:
                    return False

        assert not answered()
        go.set()
        wait_until(answered)
        text = httpx.get(server.http_url + "/metrics", trust_env=False).text
    assert 'ingot_batch_size_sum{model="affine",version="1"} 80000.0' in text


@pytest.mark.source  # has no DataPlane
async def test_bodies_that_wait_to_be_decoded_are_dropped_with_their_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = threading.Semaphore(0), threading.Event()
    texts: list[bytes] = []

    def wait(raw: bytes) -> Any:
        texts.append(raw)
        begun.release()
        assert go.wait(60)
        raise InvalidArgument("never read")

    monkeypatch.setattr(json_large, "loads", wait)
    budget = Budget(1 << 30)
    service = Service(cast(DataPlane, None), Decoder(), 1 << 30, budget, OPEN_INFERENCE)
    head = InferHead("", "", None, "", None)
    threads = compression.threads._max_workers
    bodies = [large_request() + b" " * number for number in range(threads + 1)]
    asked = [begin(service, head, raw, lambda _: None, lambda _: pytest.fail("answered")) for raw in bodies]
    for _ in range(threads):
        assert await asyncio.to_thread(begun.acquire, timeout=60)
    for item in asked:
        assert item is not None
        item.cancel()
    assert budget._held == sum(map(len, bodies[:threads]))
    go.set()
    async with asyncio.timeout(60):
        while budget._held:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(compression.threads.submit(int).result)
    assert sorted(map(len, texts)) == sorted(map(len, bodies[:threads]))


@pytest.mark.matrix
def test_every_datatype_over_http(server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
        for dtype in DType:
            if dtype in (DType.BYTES, DType.BOOL):
                continue
            values = np.arange(COUNT) % 100
            raw = body(tensor(nested(values, COUNT // 2, 2), [COUNT // 2, 2], dtype.value))
            answer = client.post(f"/v2/models/identity-{dtype.value.lower()}/infer", content=raw)
            assert answer.status_code == 200, answer.text
            assert answer.json()["outputs"][0]["data"] == values.tolist()


@pytest.mark.source  # patches to_json
@pytest.mark.parametrize(("rows", "thread"), [(3000, "ingot-server"), (15_000, "ingot-bodies")])
def test_large_answers_are_written_in_a_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, thread: str
) -> None:
    """The event loop would answer nothing else meanwhile."""
    seen: list[str] = []
    to_json = json_data.to_json

    def noted(*args: Any) -> bytes:
        seen.append(threading.current_thread().name)
        return to_json(*args)

    monkeypatch.setattr(json_data, "to_json", noted)
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    with (
        ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0) as server,
        ingot.Client(server.http_url) as c,
    ):
        seen.clear()
        answer = c.infer("affine", {"x": x}, binary=False)
        assert np.array_equal(answer["y"], 2 * x + 1)
        assert np.array_equal(answer["z"], -x)
        x[0, 0] = 3e38
        with pytest.raises(InvalidArgument, match="tensor 'y' holds NaN or infinity"):
            c.infer("affine", {"x": x}, binary=False)
    assert {name.partition("_")[0] for name in seen[2:] if name != "MainThread"} == {thread}
