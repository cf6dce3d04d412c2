"""Sounds in, labels and texts out: files of sounds over each protocol, which confined processes decode."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import Client, RunningServer
from ingot.errors import InvalidArgument
from ingot.model_store import Golden
from ingot.steps import Described, Values, audio_classification, speech_recognition
from ingot.steps.sounds.operations import Fit
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests import onnx_models
from tests.archives import archive_of
from tests.support import RunIngot, run_python, succeeded

RATE, FRAME = 8_000, 160
LEVELS = ["loud", "silent"]


def sound(*levels: float, rate: int = RATE, kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """Return the file of a sound with a level for each tenth of a second."""
    soundfile = pytest.importorskip("soundfile")
    samples = np.repeat(np.asarray(levels, float), rate // 10) * np.tile([1, -1], rate // 20 * len(levels))
    file = BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def files(*contents: bytes) -> Array:
    array = np.empty(len(contents), object)
    array[:] = contents
    return array


def graph(path: Path, frames: bool) -> bytes:
    """logits = [level, 0.2 - level] of the whole sound, or of each frame, times 100."""
    nodes = [helper.make_node("Abs", ["input_values"], ["size"])]
    if frames:
        nodes += [
            helper.make_node("Unsqueeze", ["size", "one"], ["channel"]),
            helper.make_node("AveragePool", ["channel"], ["means"], kernel_shape=[FRAME], strides=[FRAME]),
            helper.make_node("Transpose", ["means"], ["level"], perm=[0, 2, 1]),
        ]
    else:
        nodes += [helper.make_node("ReduceMean", ["size", "one"], ["level"], keepdims=1)]
    nodes += [
        helper.make_node("Sub", ["limit", "level"], ["rest"]),
        helper.make_node("Concat", ["level", "rest"], ["both"], axis=-1),
        helper.make_node("Mul", ["both", "scale"], ["logits"]),
    ]
    constants = {"one": np.array([1]), "limit": np.float32(0.2), "scale": np.float32(100)}
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    inputs = [("input_values", TensorProto.FLOAT, ("batch", "samples"))]
    shape: tuple[int | str, ...] = ("batch", "frames", 2) if frames else ("batch", 2)
    outputs = [("logits", int(TensorProto.FLOAT), shape)]
    return onnx_models.save(path, nodes, inputs, outputs, initializers).read_bytes()


def level(inputs: Values, frames: bool) -> Array:
    size = np.abs(inputs["input_values"])
    size = size[:, : size.shape[1] // FRAME * FRAME].reshape(len(size), -1, FRAME) if frames else size[:, None]
    means = size.mean(-1)
    found = np.stack([means, 0.2 - means], -1) * 100
    return (found if frames else found[:, 0]).astype(np.float32)


def make(name: str, described: Described, folder: Path, example: bytes) -> Path:
    frames = name == "bursts"
    shape = ("batch", "frames", 2) if frames else ("batch", 2)
    signature = Signature(
        (TensorSpec("input_values", DType.FP32, ("batch", "samples")),),
        (TensorSpec("logits", DType.FP32, shape),),
        "batch",
    )
    opened = described.steps.open(lambda name: b"", signature)
    raw = {"audio": files(example)}
    prepared = opened.prepare(raw)
    outputs = {"logits": level(prepared, frames)}
    golden = Golden(opened.tensors(prepared), outputs, raw, opened.finish(prepared, outputs))
    path = folder / f"{name}.ingot"
    model = graph(folder / f"{name}.onnx", frames)
    archive_of(name, model, signature, [golden], {}, steps=described.steps).save(path)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sounds")
    levels = audio_classification(LEVELS, rate=RATE)
    bursts = speech_recognition(
        ["A", "-"],
        rate=RATE,
        blank="-",
        attention_mask="mask",
        convolutions=((FRAME, FRAME, 0),),
        limits={"seconds": 2},
    )
    short = audio_classification(LEVELS, rate=RATE, operations=[Fit(size=RATE // 10)])
    models = ("level", levels, sound(0.5)), ("bursts", bursts, sound(0.5, 0, 0.5)), ("short", short, sound(0.5))
    return [make(name, described, folder, example) for name, described, example in models]


@pytest.fixture(scope="module")
def server(paths: Sequence[Path]) -> Iterator[RunningServer]:
    with ingot.serve(*map(str, paths), http_port=0, grpc_port=0) as running:
        yield running


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_over_each_protocol(server: RunningServer, protocol: str) -> None:
    flac, ogg = sound(0.5, kind="FLAC"), sound(0, 0, rate=48_000, kind="OGG", subtype="OPUS")
    with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
        found = client.infer("level", {"audio": files(sound(0.5), sound(0), flac)})
        assert found["label"][:, 0].tolist() == [b"loud", b"silent", b"loud"]
        assert found["seconds"].tolist() == pytest.approx([0.1] * 3)
        assert client.infer("level", {"audio": files(ogg)})["label"][0, 0] == b"silent"
        texts = client.infer("bursts", {"audio": files(sound(0.5, 0, 0.5), sound(0, 0.5), flac)})
        assert texts["text"].tolist() == [b"AA", b"A", b"A"]  # the padding of shorter ones has none
        samples = client.infer("level", {"input_values": np.ones((1, 8), np.float32)})
        assert samples["logits"].tolist() == [[100, -80]]


def test_what_is_refused_disturbs_no_neighbours(server: RunningServer) -> None:
    ten_hours = bytearray(sound(0, kind="FLAC"))
    ten_hours[22:26] = (36_000 * RATE).to_bytes(4, "big")
    nan = sound(float("nan"), 0.5, subtype="FLOAT")
    refusals: list[tuple[bytes, str]] = [
        (b"%PDF-1.7", "element 1 of input 'audio' is not a WAV, FLAC or OGG"),
        (sound(0.5)[:-400], "element 1 of input 'audio' is a truncated WAV"),
        (bytes(ten_hours), "element 1 of input 'audio' has 36000.0 seconds; the most are 2"),
        (nan, "element 1 of input 'audio' has samples that are NaN or infinite"),
    ]
    with Client(server.http_url) as client:
        for content, message in refusals:
            with pytest.raises(InvalidArgument, match=message):
                client.infer("bursts", {"audio": files(sound(0.5), content)})
            assert client.infer("bursts", {"audio": files(sound(0.5))})["text"].tolist() == [b"A"]
        with pytest.raises(InvalidArgument, match="the model has no mask of their lengths"):
            client.infer("level", {"audio": files(sound(0.5), sound(0, 0))})


def test_json_has_base64(server: RunningServer) -> None:
    def ask(data: str) -> httpx.Response:
        tensor = {"name": "audio", "datatype": "BYTES", "shape": [1], "data": [data]}
        return httpx.post(f"{server.http_url}/v2/models/bursts/infer", json={"inputs": [tensor]}, trust_env=False)

    text, *_ = ask(base64.b64encode(sound(0.5)).decode()).json()["outputs"]
    assert text["data"] == ["A"]
    refused = ask("x.wav")
    assert refused.status_code == 400
    assert "element 0 of input 'audio' is not a WAV" in refused.json()["error"]


def test_inference_client_sends_the_bytes_of_a_sound(server: RunningServer) -> None:
    hub = pytest.importorskip("huggingface_hub")
    [best, _] = hub.InferenceClient(model=f"{server.http_url}/models/level").audio_classification(sound(0.5))
    assert (best.label, round(best.score, 3)) == ("loud", 1)
    speech = hub.InferenceClient(model=f"{server.http_url}/models/bursts")
    assert speech.automatic_speech_recognition(sound(0.5, 0, 0.5)).text == "AA"


def test_the_command_sends_a_file(server: RunningServer, run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "x.mp3").write_bytes(sound(0.5, 0, 0.5))  # the content decides, not the name
    asked = run_ingot("infer", server.http_url, "level", "--input", "audio=@x.mp3")
    assert succeeded(asked).startswith("  loud 1.000   ")
    assert succeeded(run_ingot("infer", server.http_url, "bursts", "--input", "audio=@x.mp3")) == "  AA\n"


def test_time_is_counted_and_the_task_is_shown(server: RunningServer) -> None:
    server.infer("bursts", {"audio": files(sound(0.5))})
    lines = httpx.get(f"{server.http_url}/metrics", trust_env=False).text.splitlines()
    for step in ("audio", "ctc"):
        [count] = [
            line
            for line in lines
            if line.startswith("ingot_step_seconds_count") and f'step="{step}"' in line and 'model="bursts"' in line
        ]
        assert float(count.split()[1]) >= 1
    with Client(server.http_url) as client:
        properties: Any = client.metadata("bursts")["properties"]
    assert properties["task"] == "automatic-speech-recognition"
    assert properties["raw_inputs"] == "audio:string[batch]"
    assert properties["raw_files"] == '{"audio": "audio/*"}'


def test_cut_seconds_are_counted(server: RunningServer) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.http_url}/metrics", trust_env=False).text.splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("ingot_cut_")}

    name = 'ingot_cut_seconds_total{model="short",version="1"}'
    before = read()
    assert not any(each.startswith("ingot_cut_tokens_total") for each in before)
    found = server.infer("short", {"audio": files(sound(0.5, 0, 0), sound(0.5))})
    assert found["cut_seconds"].tolist() == pytest.approx([0.2, 0])
    assert read()[name] - before[name] == pytest.approx(0.2)


@pytest.mark.matrix
def test_serving_needs_neither_torch_nor_transformers(paths: Sequence[Path]) -> None:
    code = f"""
import sys, ingot
with ingot.serve({str(paths[0])!r}, http_port=0, grpc_port=0) as running:
    running.infer("level", {{"input_values": __import__("numpy").ones((1, 8), "float32")}})
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    assert run_python(code).splitlines()[-1] == "[]"


def test_a_file_is_the_body_at_the_models_address(server: RunningServer) -> None:
    def ask(name: str, body: bytes) -> httpx.Response:
        headers = {"content-type": "audio/wav"}
        return httpx.post(f"{server.http_url}/models/{name}", content=body, headers=headers, trust_env=False)

    assert [item["label"] for item in ask("level", sound(0.9, 0.9)).json()] == LEVELS
    assert ask("bursts", sound(0.9, 0, 0.9)).json() == {"text": "AA"}
    assert "'inputs' is not a" in ask("level", b"%PDF-1.7").json()["error"]
