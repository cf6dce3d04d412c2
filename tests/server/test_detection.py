"""Pictures in, boxes and masks out: over each protocol, and as Hugging Face's client asks."""

from __future__ import annotations

import base64
from collections.abc import Iterator
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
from ingot.steps import depth_estimation, image_segmentation, object_detection
from tests import onnx_models
from tests.server import test_image_steps as colours
from tests.support import RunIngot, refused, succeeded

LABELS = ["red", "green", "blue"]


def averages(folder: Path) -> Path:
    """logits = the colours of each quarter, [n, 4, 3]; pred_boxes = the quarters."""
    quarters = np.array([[x, y, 0.5, 0.5] for y in (0.25, 0.75) for x in (0.25, 0.75)], np.float32)
    nodes = [
        helper.make_node("AveragePool", ["pixel_values"], ["pooled"], kernel_shape=[4, 4], strides=[4, 4]),
        helper.make_node("Reshape", ["pooled", "shape"], ["flat"]),
        helper.make_node("Transpose", ["flat"], ["logits"], perm=[0, 2, 1]),
        helper.make_node("ReduceMean", ["logits", "axes"], ["column"], keepdims=1),
        helper.make_node("Mul", ["column", "zero"], ["zeros"]),
        helper.make_node("Add", ["zeros", "quarters"], ["pred_boxes"]),
    ]
    constants = {
        "shape": np.array([0, 3, 4]),
        "axes": np.array([2]),
        "zero": np.zeros(1, np.float32),
        "quarters": quarters[None],
    }
    inputs = [("pixel_values", TensorProto.FLOAT, ("batch", 3, 8, 8))]
    outputs = [("logits", TensorProto.FLOAT, ("batch", 4, 3)), ("pred_boxes", TensorProto.FLOAT, ("batch", 4, 4))]
    found = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return onnx_models.save(folder / "quarters.onnx", nodes, inputs, outputs, found)


def classes(folder: Path) -> Path:
    """logits = the pixels."""
    nodes = [helper.make_node("Identity", ["pixel_values"], ["logits"])]
    shape = ("batch", 3, 8, 8)
    return onnx_models.save(
        folder / "pixels.onnx",
        nodes,
        [("pixel_values", TensorProto.FLOAT, shape)],
        [("logits", TensorProto.FLOAT, shape)],
        [],
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("detection")
    options: dict[str, Any] = {"size": 8, "mean": (0, 0, 0), "std": (1, 1, 1), "filter": "nearest"}
    steps = object_detection(LABELS, function="none", threshold=0.6, **options)
    ingot.export_model(averages(folder), steps=steps, name="quarters").save(folder / "quarters.ingot")
    steps = image_segmentation(LABELS, **options)
    ingot.export_model(classes(folder), steps=steps, name="pixels").save(folder / "pixels.ingot")
    colours.make(folder).save(folder / "colour.ingot")
    paths = [str(folder / f"{name}.ingot") for name in ("quarters", "pixels", "colour")]
    with ingot.serve(*paths, http_port=0, grpc_port=0) as running:
        yield running


def picture(*quarters: str, size: tuple[int, int] = (40, 20), kind: str = "PNG") -> bytes:
    """Return a file with a colour in each quarter."""
    pillow = pytest.importorskip("PIL.Image")
    drawn = pillow.new("RGB", size)
    for index, colour in enumerate(quarters):
        corner = index % 2 * size[0] // 2, index // 2 * size[1] // 2
        drawn.paste(pillow.new("RGB", (size[0] // 2, size[1] // 2), colour), corner)
    file = BytesIO()
    drawn.save(file, kind)
    return file.getvalue()


def files(*contents: bytes) -> Any:
    array = np.empty(len(contents), object)
    array[:] = contents
    return array


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_boxes_over_each_protocol(server: RunningServer, protocol: str) -> None:
    with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
        sent = files(picture("red", "black", "black", "blue"), picture("lime", "lime", "red", "lime", size=(20, 20)))
        found = client.infer("quarters", {"image": sent})
        assert found["count"].tolist() == [2, 4]
        assert found["label"].tolist() == [[b"red", b"blue", b"", b""], [b"green", b"green", b"red", b"green"]]
        assert found["box"][0].tolist() == [[0, 0, 20, 10], [20, 10, 40, 20], [0] * 4, [0] * 4]
        assert found["box"][1, 2].tolist() == [0, 10, 10, 20]
        everything = client.infer("quarters", {"image": sent, "threshold": np.array([-1], np.float32)})
        assert everything["count"].tolist() == [4, 4]
        nothing = client.infer("quarters", {"image": sent, "threshold": np.array([2, 2], np.float32)})
        assert nothing["box"].shape == (2, 0, 4)
        with pytest.raises(InvalidArgument, match="input 'threshold' has 3 items, input 'image' 2"):
            client.infer("quarters", {"image": sent, "threshold": np.ones(3, np.float32)})
        assert client.metadata("quarters")["properties"]["raw_optional_inputs"] == "threshold:float32[batch]"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_masks_over_each_protocol(server: RunningServer, protocol: str) -> None:
    pillow = pytest.importorskip("PIL.Image")
    with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
        found = client.infer("pixels", {"image": files(picture("red", "blue", "red", "blue"))})
    assert found["label"].tolist() == [[b"red", b"blue"]]
    red, blue = (np.asarray(pillow.open(BytesIO(mask))) for mask in found["mask"][0])
    assert red.shape == (20, 40)
    assert (red[:, :20] == 255).all()
    assert np.array_equal(red == 255, blue == 0)


def test_the_command_prints_a_table(server: RunningServer, run_ingot: RunIngot, tmp_path: Path) -> None:
    (tmp_path / "street.png").write_bytes(picture("red", "black", "black", "blue"))
    asked = run_ingot("infer", server.http_url, "quarters", "--input", "image=@street.png")
    assert succeeded(asked).splitlines() == [
        "  label  score  left  top  right  bottom",
        "  red    1.000     0    0     20      10",
        "  blue   1.000    20   10     40      20",
    ]
    more = run_ingot("infer", server.http_url, "quarters", "--input", "image=@street.png", "--input", "threshold=2")
    assert succeeded(more).strip() == "no boxes"
    wrong = run_ingot("infer", server.http_url, "quarters", "--input", "image=@street.png", "--input", "threshold=low")
    assert "write threshold=3, or threshold=@FILE" in refused(wrong)
    masks = run_ingot("infer", server.http_url, "pixels", "--input", "image=@street.png")
    assert "a mask of 40 x 20 pixels" in succeeded(masks)


class TestRawBytes:
    def post(self, server: RunningServer, name: str, body: Any, kind: str = "image/png") -> httpx.Response:
        given: Any = {"json": body} if isinstance(body, dict) else {"content": body, "headers": {"content-type": kind}}
        return httpx.post(f"{server.http_url}/models/{name}", **given, trust_env=False)

    @pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "", "application/x-www-form-urlencoded"])
    def test_a_file_is_the_body(self, server: RunningServer, kind: str) -> None:
        found = self.post(server, "quarters", picture("red", "black", "black", "blue"), kind).json()
        assert found == [
            {"label": "red", "score": 1.0, "box": {"xmin": 0, "ymin": 0, "xmax": 20, "ymax": 10}},
            {"label": "blue", "score": 1.0, "box": {"xmin": 20, "ymin": 10, "xmax": 40, "ymax": 20}},
        ]

    def test_classes_and_masks(self, server: RunningServer) -> None:
        [first, *_] = self.post(server, "colour", picture(*["blue"] * 4)).json()
        assert first == {"label": "blue", "score": pytest.approx(1, abs=1e-3)}
        [red] = self.post(server, "pixels", picture(*["red"] * 4)).json()
        assert (red["label"], red["score"]) == ("red", None)
        assert base64.b64decode(red["mask"]).startswith(b"\x89PNG")

    def test_parameters_come_in_json(self, server: RunningServer) -> None:
        def ask(name: str, **parameters: Any) -> httpx.Response:
            text = base64.b64encode(picture("red", "maroon", "black", "blue")).decode()
            return self.post(server, name, {"inputs": text, "parameters": parameters})

        assert [item["label"] for item in ask("quarters", threshold=0.4).json()] == ["red", "red", "blue"]
        assert len(ask("colour", top_k=1).json()) == 1
        for name, parameters, message in (
            ("quarters", {"threshold": 7}, "'parameters.threshold' is 7; it must be a number from 0 to 1"),
            ("quarters", {"top_k": 7}, "'parameters.top_k' is not a field"),
            ("pixels", {"subtask": "panoptic"}, "'parameters.subtask' is 'panoptic'; it must be one of: semantic"),
            ("pixels", {"mask_threshold": 0.3}, "'parameters.mask_threshold' is not a field"),
            ("colour", {"function_to_apply": "none"}, "'parameters.function_to_apply' is 'none'; the model's steps"),
        ):
            refused = ask(name, **parameters)
            assert refused.status_code == 400
            assert message in refused.json()["error"]

    def test_several_files_have_several_answers(self, server: RunningServer) -> None:
        texts = [base64.b64encode(picture(*[colour] * 4)).decode() for colour in ("red", "lime")]
        found = self.post(server, "colour", {"inputs": texts}).json()
        assert [row[0]["label"] for row in found] == ["red", "green"]

    def test_bad_files_are_named(self, server: RunningServer) -> None:
        for body, message in (
            (b"%PDF-1.7", "'inputs' is not a JPEG, PNG"),
            (b"", "'inputs' is empty"),
            (picture("red")[:60], "'inputs' is a damaged or truncated PNG"),
        ):
            refused = self.post(server, "colour", body)
            assert refused.status_code == 400
            assert message in refused.json()["error"]
        listed = self.post(server, "colour", {"inputs": [base64.b64encode(picture("red")).decode(), "cat.jpg"]})
        assert "'inputs[1]' is not a JPEG" in listed.json()["error"]
        assert self.post(server, "colour", {"inputs": 3}).status_code == 400


def test_hugging_faces_client_asks(server: RunningServer) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def client(name: str) -> Any:
        return hub.InferenceClient(model=f"{server.http_url}/models/{name}")

    drawn = picture("red", "black", "black", "blue")
    assert client("colour").image_classification(drawn)[0].label in LABELS
    assert len(client("colour").image_classification(drawn, top_k=2)) == 2
    [red, blue] = client("quarters").object_detection(drawn)
    assert (red.label, red.box.xmax, blue.box.xmin) == ("red", 20, 20)
    assert client("quarters").object_detection(drawn, threshold=1) == []
    masks = client("pixels").image_segmentation(drawn)
    assert masks[0].mask.size == (40, 20)
    assert masks[0].mask.mode == "L"


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A segmentation with a query for each colour, and a model whose depths are red."""
    folder = tmp_path_factory.mktemp("planes")
    pixels = [("pixel_values", TensorProto.FLOAT, ("batch", 3, 8, 8))]
    classes = np.where(np.eye(4), 8, 0).astype(np.float32)[None, :3]
    constants = {
        "classes": classes,
        "axes": np.array([2, 3]),
        "zero": np.zeros(1, np.float32),
        "shape": np.array([0, 3, 1]),
        "scale": np.array([40], np.float32),
        "half": np.array([20], np.float32),
        "first": np.array(0),
    }
    nodes = [
        helper.make_node("ReduceMean", ["pixel_values", "axes"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Reshape", ["nothing", "shape"], ["column"]),
        helper.make_node("Add", ["column", "classes"], ["class_queries_logits"]),
        helper.make_node("Mul", ["pixel_values", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "half"], ["masks_queries_logits"]),
        helper.make_node("Gather", ["pixel_values", "first"], ["predicted_depth"], axis=1),
    ]
    arrays = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = {"class_queries_logits": ("batch", 3, 4), "masks_queries_logits": ("batch", 3, 8, 8)}
    listed = [(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    queries = onnx_models.save(folder / "queries.onnx", nodes[:-1], pixels, listed, arrays[:-1])
    depth = [("predicted_depth", TensorProto.FLOAT, ("batch", 8, 8))]
    red = onnx_models.save(folder / "red.onnx", nodes[-1:], pixels, depth, arrays[-1:])
    options: dict[str, Any] = {"size": 8, "mean": (0, 0, 0), "std": (1, 1, 1), "filter": "nearest"}
    steps = image_segmentation(LABELS, queries=True, **options)
    ingot.export_model(queries, steps=steps, name="queries").save(folder / "queries.ingot")
    ingot.export_model(red, steps=depth_estimation(**options), name="red").save(folder / "red.ingot")
    with ingot.serve(str(folder / "queries.ingot"), str(folder / "red.ingot"), http_port=0, grpc_port=0) as running:
        yield running


def pixels_of(file: bytes) -> Any:
    return np.asarray(pytest.importorskip("PIL.Image").open(BytesIO(file)))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_segments_over_each_protocol(planes: RunningServer, protocol: str) -> None:
    with Client(planes.http_url if protocol == "http" else planes.grpc_url) as client:
        sent = files(picture("red", "red", "black", "blue"), picture("lime", "lime", "lime", "lime", size=(20, 20)))
        found = client.infer("queries", {"image": sent})
        assert found["count"].tolist() == [2, 1]
        assert found["label"].tolist() == [[b"red", b"blue"], [b"green", b""]]
        assert found["score"][0].min() > 0.9
        red, blue = map(pixels_of, found["mask"][0])
        assert red.shape == (20, 40)
        assert (red[5, 10], red[15, 30], blue[15, 30], blue[5, 30]) == (255, 0, 255, 0)
        assert client.infer("queries", {"image": sent, "threshold": np.array([1], np.float32)})["count"].sum() == 0
        each = client.infer("queries", {"image": sent, "subtask": files(b"semantic", b"panoptic")})
        assert each["score"].tolist()[0] == [0, 0]
        assert each["score"][1, 0] > 0.9
        with pytest.raises(InvalidArgument, match="'subtask' is 'all'; send one of: panoptic, instance, semantic"):
            client.infer("queries", {"image": sent, "subtask": files(b"all")})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_depths_over_each_protocol(planes: RunningServer, protocol: str) -> None:
    with Client(planes.http_url if protocol == "http" else planes.grpc_url) as client:
        sent = files(picture("red", "black", "black", "red"), picture("red", "red", "red", "red", size=(20, 10)))
        found = client.infer("red", {"image": sent})
        assert found["original_size"].tolist() == [[20, 40], [10, 20]]
        assert found["predicted_depth"].shape == (2, 20, 40)
        assert found["predicted_depth"][0, 3, 8] == pytest.approx(1, abs=0.01)
        assert not found["predicted_depth"][1, 10:].any()
        drawn = pixels_of(found["depth"][0])
        assert (drawn.shape, drawn[15, 5] < 40, drawn[5, 5] > 200) == ((20, 40), True, True)


def test_people_and_hugging_faces_client_read_segments_and_depths(
    planes: RunningServer, run_ingot: RunIngot, tmp_path: Path
) -> None:
    (tmp_path / "picture.png").write_bytes(picture("red", "red", "black", "blue"))
    image = f"image=@{tmp_path / 'picture.png'}"
    found = succeeded(run_ingot("infer", planes.http_url, "queries", "--input", image)).splitlines()
    assert [line.split()[0] for line in found] == ["red", "blue"]
    assert found[1].endswith("  0.999  a mask of 40 x 20 pixels")
    depths = succeeded(run_ingot("infer", planes.http_url, "red", "--input", image))
    assert depths.strip().startswith("depths from ")
    assert "drawn in 40 x 20 pixels" in depths
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(model=f"{planes.http_url}/models/queries")
    drawn = picture("red", "red", "black", "blue")
    red, blue = client.image_segmentation(drawn, threshold=0.5, mask_threshold=0.4, overlap_mask_area_threshold=0.1)
    assert (red.label, blue.label, red.mask.size) == ("red", "blue", (40, 20))
    assert red.score > 0.9
    assert client.image_segmentation(drawn, subtask="semantic")[0].score is None
    posted = httpx.post(f"{planes.http_url}/models/red", content=drawn, headers={"content-type": "image/png"})
    assert pixels_of(base64.b64decode(posted.json()["depth"])).shape == (20, 40)
