"""Folders of detectors and segmentations: steps that are proved against transformers' processors and pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import InvalidArgument, ParityError, Unsupported
from ingot.export import export_model, load_source, tasks
from ingot.export.proof import answers
from ingot.export.stages import steps as stage
from ingot.export.tasks.pictures import sides_of
from ingot.model_store import Archive
from ingot.steps import Values
from ingot.steps.after.pixels import png
from ingot.steps.images.operations import CenterCrop, Pad, Resize
from ingot.steps.images.pictures import drawn
from tests.export.tasks import detectors, segmenters
from tests.support import RunIngot, refused, succeeded

# Pictures of several sizes, which a graph accepts one at a time.
_ALONE = (
    detectors.yolos,
    segmenters.detr,
    segmenters.depth_anything,
    segmenters.prompt_depth_anything,
    segmenters.glpn,
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("save", "kind", "after"),
    [
        (detectors.yolos, "Yolos", "boxes"),
        (detectors.detr, "Detr", "boxes"),
        (detectors.conditional_detr, "ConditionalDetr", "boxes"),
        (detectors.rt_detr, "RTDetr", "boxes"),
        (detectors.segformer, "Segformer", "masks"),
        (segmenters.detr, "Detr", "segments"),
        (segmenters.maskformer, "MaskFormer", "segments"),
        (segmenters.mask2former, "Mask2Former", "segments"),
        (segmenters.dpt, "DPT", "depth"),
        (segmenters.depth_anything, "DPT", "depth"),
        (segmenters.prompt_depth_anything, "PromptDepthAnything", "depth"),
        (segmenters.glpn, "GLPN", "depth"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_folder_answers_as_transformers_pipeline(
    run_ingot: RunIngot, tmp_path: Path, save: Callable[[Path], Path], kind: str, after: str
) -> None:
    folder = save(tmp_path / "net")
    result = run_ingot("export", folder, "--out", tmp_path / "net.ingot")
    assert succeeded(result).startswith(f"{tmp_path / 'net.ingot'}: net, fp32")
    assert f"{kind}ImageProcessorPil; values of 60 hard pictures: equal to the bit" in result.stderr
    assert f"image -> graph -> {after}; answers of 50 pictures equal to transformers" in result.stderr
    variant = Archive.open(tmp_path / "net.ingot").variant()
    proof = variant.serving.evidence.steps
    assert proof is not None
    assert (proof.items, proof.answers) == (60, 50)
    assert proof.error < (1e-4 if after in ("segments", "depth") else 1e-5)
    [golden, *_] = [case for case in variant.goldens() if case.raw]
    assert golden.answers.get("count", np.ones(1)).sum() > 0
    with ingot.serve(str(tmp_path / "net.ingot"), http_port=0, grpc_port=0) as running:  # replays the goldens
        files = [*drawn(2, seed=5, sizes=((90, 70), (60, 80)))]
        for chosen in [files[:1], files[1:]] if save in _ALONE else [files]:
            asked = running.infer("net", {"image": np.array([*chosen, None], object)[:-1]})
            assert len(asked["depth" if after == "depth" else "count"]) == len(chosen)


@pytest.mark.matrix
def test_a_model_without_a_head_returns_its_hidden_states(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    ViTModel(config).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    found = tasks.find(tmp_path)
    assert found is not None
    assert found.task == "image-feature-extraction"
    module: Any = load_source(str(tmp_path))
    variant = export_model(module, steps=found.describe(module), name="net").variant()
    proof, steps = variant.serving.evidence.steps, variant.serving.steps
    assert proof is not None
    assert steps is not None
    assert (proof.items, proof.answers) == (60, 50)
    assert steps.outputs[0].shape == ("batch", 5, 16)


def test_other_models_are_refused_by_name(tmp_path: Path, run_ingot: RunIngot) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ResNetModel"]}))
    for task, needed in (
        ("object-detection", "ObjectDetection"),
        ("image-segmentation", "SemanticSegmentation"),
        ("depth-estimation", "DepthEstimation"),
    ):
        result = run_ingot("export", tmp_path, "--task", task, "--out", tmp_path / "net.ingot")
        assert f"task {task} needs a model ...For{needed}" in (message := refused(result))
        assert "and preprocessor_config.json; " in message
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Owlv2ImageProcessor"}')
    for architecture, message in (
        ("Owlv2ForObjectDetection", r"how Owlv2.* chooses boxes is not known|the steps of Owlv2.* are not known"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        found = tasks.find(tmp_path)
        assert found is not None
        module: Any = type(architecture, (), {"config": None})()
        with pytest.raises(Unsupported, match=message):
            found.describe(module)


@pytest.mark.matrix
def test_boxes_that_differ_are_found(tmp_path: Path) -> None:
    found = tasks.find(detectors.yolos(tmp_path))
    assert found is not None
    module: Any = load_source(str(found.folder))
    described = found.describe(module)
    steps = described.steps
    [boxes] = steps.after
    changed = steps.model_copy(update={"after": (boxes.model_copy(update={"form": "xyxy"}),)})
    wrong = type(described)(changed, original=described.original, inputs=described.inputs)
    with pytest.raises(ParityError, match="the answers of the steps differ from the original's: 'box' departs by"):
        export_model(module, steps=wrong, name="net")


class TestDifferences:
    def boxes(self, *rows: tuple[str, float, float]) -> Values:
        label = np.array([[label.encode() for label, _, _ in rows]], object)
        score = np.array([[score for _, score, _ in rows]], np.float32)
        box = np.array([[[left, 0, 100, 100] for _, _, left in rows]], np.float32)
        return {"label": label, "score": score, "box": box, "count": np.array([len(rows)], np.int32)}

    def error(self, *rows: tuple[str, float, float]) -> float:
        expected = self.boxes(("a", 0.9, 10), ("b", 0.8, 20), ("b", 0.7, 30))
        return answers.error(expected, self.boxes(*rows), 1e-4)[1]

    def test_the_order_of_boxes_does_not_count(self) -> None:
        assert self.error(("b", 0.7, 30), ("a", 0.9, 10), ("b", 0.8, 20)) == 0
        assert self.error(("a", 0.9, 10), ("b", 0.8, 20.005), ("b", 0.7, 30)) == pytest.approx(5e-5, rel=0.01)

    def test_rounding_may_swap_labels_and_the_last_box(self) -> None:
        assert self.error(("b", 0.9, 10), ("b", 0.8, 20), ("b", 0.7, 30)) == 0  # two classes with the same score
        assert self.error(("a", 0.9, 10), ("b", 0.8, 20), ("b", 0.7, 80)) == 0  # the last of the best

    @pytest.mark.parametrize(
        "rows",
        [
            [("a", 0.9, 10), ("b", 0.8, 20)],
            [("a", 0.9, 50), ("b", 0.8, 20), ("b", 0.7, 30)],
            [("a", 0.9, 10), ("b", 0.75, 20), ("b", 0.7, 30)],
            [("a", 0.9, 10), ("b", 0.8, 20), ("b", 0.65, 30)],
            [("b", 0.7, 50), ("b", 0.7, 60), ("b", 0.7, 70)],
        ],
        ids=["number", "box", "score", "last score", "all"],
    )
    def test_other_boxes_differ(self, rows: list[tuple[str, float, float]]) -> None:
        assert self.error(*rows) > 1e-2

    def test_the_unit_of_depths_does_not_count(self) -> None:
        drawn = np.array([png(np.zeros((2, 2), np.uint8))], object)
        near, far = ({"depth": drawn, "predicted_depth": np.full((1, 2, 2), 1e-4 * by, "f4")} for by in (1, 1.5))
        name, error = answers.error(near, far, 0)
        assert name == "predicted_depth"
        assert error == pytest.approx(0.5)

    def test_empty_answers_are_the_last_goldens(self) -> None:
        rows = {"label": np.array([[b"", b""], [b"a", b""]], object), "count": np.array([0, 1], np.int32)}
        assert stage._telling(rows).tolist() == [False, True]
        assert stage._telling({"text": np.array([b"a", b""], object)}).tolist() == [True, False]
        assert stage._telling({"score": np.zeros(2)}).tolist() == [True, True]

    def test_masks_differ_by_pixels(self) -> None:
        mask = np.zeros((10, 10), bool)
        mask[:5] = True
        moved = mask.copy()
        moved[5, 0] = True

        def of(sky: Any) -> Values:
            pair = np.array([[png(sky), png(~sky)]], object)
            return {"label": np.array([[b"sky", b"sea"]], object), "mask": pair, "count": np.array([2], np.int32)}

        assert answers.error(of(mask), of(mask), 0) == ("mask", 0)
        assert answers.error(of(mask), of(moved), 0) == ("mask", 0.01)
        assert stage._allowed(of(mask), 1e-4) == 1e-4
        assert BytesIO(png(mask)).read(4) == b"\x89PNG"


def test_sizes_of_the_graphs_input_follow_from_operations() -> None:
    exact = Resize(rule="exact", height=64, width=48)
    bounded = Resize(rule="bounded_edges", edge=800, longest=1333)
    assert sides_of([exact]) == (64, 48)
    assert sides_of([Resize(rule="shortest_edge", edge=64), CenterCrop(height=56, width=56)]) == (56, 56)
    assert sides_of([bounded]) == ("height=32..1333", "width=32..1333")
    assert sides_of([bounded.model_copy(update={"multiple": 16})]) == ("height=32..1328:16", "width=32..1328:16")
    assert sides_of([bounded, Pad(to="size", height=1333, width=1333)]) == (1333, 1333)
    assert sides_of([Resize(rule="shortest_edge", edge=64)]) is None


def test_a_declared_task_needs_its_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DetrForObjectDetection"]}))
    with pytest.raises(InvalidArgument, match=r"preprocessor_config\.json"):
        tasks.find(tmp_path, "object-detection")


def test_steps_of_a_folder_serve_a_graph_from_elsewhere(tmp_path: Path) -> None:
    for save, last in ((detectors.segformer, "masks"), (detectors.yolos, "boxes")):
        described = tasks.of_folder(save(tmp_path / last))
        assert described.steps.after[-1].kind == last
