"""A variant's graphs may refer only to its own layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ingot.errors import InvalidArchive
from ingot.model_store import Archive, BlobFolder, Descriptor, Store, add_variant
from ingot.model_store.format import manifest, onnx_graph
from tests.model_store import forgeries, samples
from tests.support import RunIngot

DATA = np.ones(3, np.float32).tobytes()
HEX = "a0" * 32


@pytest.fixture
def blobs() -> BlobFolder:
    return BlobFolder.scratch()


@pytest.fixture
def weight(blobs: BlobFolder) -> Descriptor:
    return blobs.put(DATA, manifest.WEIGHT)


def made(blobs: BlobFolder, graph: bytes, *weights: Descriptor) -> Archive:
    added = add_variant(blobs, samples.serving(), blobs.put(graph, manifest.WEIGHT), weights, [samples.GOLDEN])
    return Archive.create(blobs, [added])


class TestWhatIsTaken:
    def test_its_own_weights(self, blobs: BlobFolder, weight: Descriptor, tmp_path: Path) -> None:
        archive = made(blobs, forgeries.adding(forgeries.external(weight.hex)), weight)
        Store(tmp_path).push(archive, "tiny:1")

    def test_texts_and_names_that_look_like_digests(self, blobs: BlobFolder, tmp_path: Path) -> None:
        keys = numpy_helper.from_array(np.array([HEX, f"location {HEX}"], dtype=object), "keys")
        weight = helper.make_tensor(f"w_{HEX}", TensorProto.FLOAT, [3], [1, 2, 3])
        model = ModelProto.FromString(forgeries.adding(weight))
        model.graph.initializer.append(keys)
        large = numpy_helper.from_array(np.ones((600, 600), np.float32), f"large_{HEX}")
        model.graph.initializer.append(large)
        packed, weights = onnx_graph.pack(ir.from_proto(model), blobs)
        assert len(weights) == 1
        added = add_variant(blobs, samples.serving(), packed, weights, [])
        Store(tmp_path).push(Archive.create(blobs, [added]), "tiny:1")


class TestWhatIsRefused:
    """Refused when an archive is made, and again when another program's archive is pushed."""

    @pytest.mark.parametrize(
        "location",
        ["", HEX, "../blob", "/etc/hostname", "sub/OWN", "./OWN", "OWN/", "OWN ", "OWN\0", "OWN0", "STRAY", "UPPER"],
    )
    def test_a_location_outside_of_its_layers(
        self, blobs: BlobFolder, weight: Descriptor, location: str, tmp_path: Path
    ) -> None:
        other = blobs.put(forgeries.adding(forgeries.external("x")), manifest.WEIGHT).hex
        location = location.replace("OWN", weight.hex).replace("STRAY", other).replace("UPPER", weight.hex.upper())
        graph = blobs.put(forgeries.adding(forgeries.external(location)), manifest.WEIGHT)
        with pytest.raises(InvalidArchive, match="variant 'fp32' refers to a blob that is not its own: ") as caught:
            add_variant(blobs, samples.serving(), graph, [weight], [])
        assert caught.value.args[0].isprintable()
        with pytest.raises(InvalidArchive, match="refers to a blob that is not its own: "):
            Store(tmp_path).push(forgeries.forged(blobs, samples.serving(), graph, [weight]), "thief:1")
        assert Store(tmp_path).names() == []

    def test_a_graph_that_cannot_be_read(self, blobs: BlobFolder, weight: Descriptor) -> None:
        graph = forgeries.adding(forgeries.external(weight.hex))
        with pytest.raises(InvalidArchive, match=r"^variant 'fp32': graph sha256:\w+: its encoding is damaged at byte"):
            made(blobs, graph[:-20], weight)

    def test_a_graph_of_2_gib_is_not_read(self, blobs: BlobFolder) -> None:
        graph = Descriptor(media_type=manifest.WEIGHT, digest=f"sha256:{HEX}", size=1 << 31)
        with pytest.raises(InvalidArchive, match="has 2147483648 bytes; ONNX graphs are smaller than 2 GiB"):
            add_variant(blobs, samples.serving(), graph, [], [])

    @pytest.mark.parametrize("kind", ["onnx", "pt2"])
    def test_a_plan_with_a_part_of_another_model(self, blobs: BlobFolder, kind: str) -> None:
        serving = samples.serving().model_copy(update={"format": "partitioned"})
        segments = [{"format": kind, "blob": HEX, "inputs": ["x"], "outputs": ["y"]}]
        plan = {"signature": serving.model_dump(mode="json")["signature"], "segments": segments, "outputs": ["y"]}
        document = blobs.put(json.dumps(plan).encode(), manifest.WEIGHT)
        with pytest.raises(
            InvalidArchive, match=f"the plan of variant 'fp32' refers to a blob that is not its own: {HEX}"
        ):
            add_variant(blobs, serving, document, [], [])

    def test_the_command_line_refuses_it(self, blobs: BlobFolder, run_ingot: RunIngot, tmp_path: Path) -> None:
        graph = blobs.put(forgeries.adding(forgeries.external("../\x1b[31mred")), manifest.WEIGHT)
        forgeries.forged(blobs, samples.serving(), graph).save(tmp_path / "thief.ingot")
        result = run_ingot("copy", tmp_path / "thief.ingot", "thief:1")
        assert result.returncode == 1
        assert r"not its own: ../\x1b[31mred; " in " ".join(result.stderr.split())
