"""Recipes that compile a PyTorch program, through the public API. One compiled model serves all but the long tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot import Client
from ingot.errors import InvalidArgument, NotFound, QuantizationError, Unsupported
from ingot.export import export_model
from ingot.export.lower import aoti
from ingot.export.lower.packed import Packed
from ingot.export.program import Program
from ingot.model_store import Archive, BatchLatency, BlobFolder
from ingot.quant import BFloat16, Float16, PT2EInt8, QuantConfig, quantize
from ingot.quant.config import Recipe
from ingot.quant.measure.stopwatch import Race
from ingot.quant.report.records import Report
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array
from tests.export.models import net
from tests.quant.variants.test_pt2e import Net
from tests.server.test_lifecycle import running
from tests.support import RequireTool, RunIngot

pytestmark = pytest.mark.matrix  # compiling takes a minute; tests/runtime/engines/test_aoti.py compiles one model

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((40, 3, 8, 8)).astype(np.float32)


def config(recipe: Recipe, **options: Any) -> QuantConfig:
    """Forced, as speed depends on other load on the machine."""
    return QuantConfig(recipe=recipe, **{"allow_code": True, "force": True, "threads": 1, "batches": (1, 4), **options})


def joined(*archives: Archive) -> Archive:
    """Return one archive of the variants of several."""
    blobs = BlobFolder.scratch()
    return Archive.create(blobs, [item.copy_to(blobs).variant().descriptor for item in archives])


def answer(archive: Archive, name: str, inputs: dict[str, Array]) -> Array:
    variant = archive.variant(name)
    engine = load_engine(EngineSpec(variant.path(), format=variant.serving.format, device="cpu", allow_code=True))
    try:
        return next(iter(engine.run(inputs).values()))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def program() -> Archive:
    torch.manual_seed(0)
    return export_model(Net(), inputs=["image:float32[batch,3,8,8]"], name="net", target="pt2")


@pytest.fixture(scope="module")
def quantized(program: Archive, require_tool: RequireTool) -> Archive:
    require_tool("g++")
    pytest.importorskip("torchao")
    return quantize(program, {"image": IMAGES}, config=config(PT2EInt8()))


@pytest.fixture
def compile_at_once(quantized: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace compilation by a cached result that is twice as fast as the original."""
    made = quantized.variant("int8-aoti")

    def pack(program: Program, blobs: BlobFolder, *, freeze: bool) -> Packed:
        blobs.copy(made.blobs, made.graph)
        return Packed(made.graph, (), "aoti", made.serving.requires)

    monkeypatch.setattr(aoti, "pack", pack)
    time_as(monkeypatch, 2)


def time_as(patch: pytest.MonkeyPatch, speed: float) -> None:
    latencies = [tuple(BatchLatency(rows=rows, seconds=time) for rows in (1, 4)) for time in (1.0, 1 / speed)]
    patch.setattr(Race, "run", lambda race: latencies)


class TestInt8:
    def test_it_answers_as_the_program_at_any_batch(self, quantized: Archive) -> None:
        for rows in (1, 2, 9):
            inputs = {"image": IMAGES[:rows]}
            expected, actual = answer(quantized, "fp32-pt2", inputs), answer(quantized, "int8-aoti", inputs)
            assert 0 < np.linalg.norm(actual - expected) < 0.1 * np.linalg.norm(expected)

    def test_it_describes_its_recipe_and_its_parent(self, program: Archive, quantized: Archive) -> None:
        serving = quantized.variant("int8-aoti").serving
        assert (serving.format, serving.precision) == ("aoti", "int8")
        assert serving.requires["engine"] == "aotinductor"
        assert serving.parents == (program.variant().descriptor.digest,)
        assert serving.recipe is not None
        expected = {"name": "pt2e-int8", "dynamic": False, "quantized_ops": 3, "operators": {"conv2d": 2, "linear": 1}}
        assert expected.items() <= serving.recipe.items()
        assert {"torch", "torchao"} <= set(serving.provenance.versions)
        quantized.verify()

    def test_its_evidence_is_measured_on_held_out_rows(self, quantized: Archive) -> None:
        variant = quantized.variant("int8-aoti")
        evidence = variant.serving.evidence
        assert evidence.metric is not None
        assert (evidence.metric.name, evidence.metric.held_out, evidence.holds) == ("cosine", True, True)
        assert evidence.metric.drop.low <= evidence.metric.drop.value <= evidence.metric.drop.high
        assert evidence.agreement[0].cosine > 0.99
        assert set(evidence.speedups()) == {1, 4}
        report = Report.model_validate_json(variant.document("quantization.json") or b"")
        assert [(layer.name, layer.scheme) for layer in report.layers] == [
            (name, "static int8") for name in ("first", "second", "head")
        ]
        assert report.audit is not None
        assert sum(report.audit.quantized.values()) == 3
        assert b"first" in (variant.document("quantization.html") or b"")
        assert b"native code for processors of this kind" in (variant.document("quantization.txt") or b"")

    def test_its_goldens_are_its_own_answers(self, quantized: Archive) -> None:
        goldens = quantized.variant("int8-aoti").goldens()
        assert len(goldens) == len(quantized.variant("fp32-pt2").goldens()) > 0
        for golden in goldens:
            assert np.allclose(answer(quantized, "int8-aoti", golden.inputs), golden.outputs["output"], atol=1e-5)

    @pytest.mark.usefixtures("compile_at_once")
    def test_layers_stay_in_floats_on_demand(self, program: Archive) -> None:
        made = quantize(program, {"image": IMAGES}, config=config(PT2EInt8(keep=("second",)), keep=("head",)))
        report = Report.model_validate_json(made.variant("int8-aoti").document("quantization.json") or b"")
        assert [layer.scheme for layer in report.layers] == ["static int8", "float", "float"]
        with pytest.raises(InvalidArgument, match="no layer 'third'"):
            quantize(program, {"image": IMAGES}, config=config(PT2EInt8(keep=("third",))))

    @pytest.mark.usefixtures("compile_at_once")
    def test_ranges_of_each_call_need_no_data(self, program: Archive) -> None:
        made = quantize(program, config=config(PT2EInt8(dynamic=True)))
        serving = made.variant("int8-aoti").serving
        assert serving.recipe is not None
        assert serving.recipe["operators"] == {"linear": 1}
        assert any("generated inputs" in note for note in serving.provenance.notes)
        with pytest.raises(InvalidArgument, match="'pt2e-int8' needs calibration data"):
            quantize(program, config=config(PT2EInt8()))

    @pytest.mark.usefixtures("compile_at_once")
    def test_a_model_in_onnx_is_what_it_is_measured_against(self, program: Archive) -> None:
        torch.manual_seed(0)
        graph = export_model(Net(), inputs=["image:float32[batch,3,8,8]"], name="net")
        made = quantize(joined(graph, program), {"image": IMAGES}, config=config(PT2EInt8()))
        assert [variant.name for variant in made.variants] == ["int8-aoti", "fp32", "fp32-pt2"]
        variant = made.variant("int8-aoti")
        assert variant.serving.parents == (program.variant().descriptor.digest,)
        report = Report.model_validate_json(variant.document("quantization.json") or b"")
        assert report.size == made.variant("fp32").size


class TestHalf:
    @pytest.mark.long
    def test_bfloat16_is_compiled_for_the_cpu(self, program: Archive, require_tool: RequireTool) -> None:
        require_tool("g++")
        made = quantize(program, {"image": IMAGES}, config=config(BFloat16(device="cpu")))
        variant = made.variant("bf16-aoti")
        assert (variant.serving.format, variant.serving.precision) == ("aoti", "bf16")
        assert variant.serving.evidence.agreement[0].cosine > 0.999
        inputs = {"image": IMAGES[:5]}
        assert np.allclose(answer(made, "bf16-aoti", inputs), answer(made, "fp32-pt2", inputs), atol=0.05)

    def test_float16_is_refused_where_processors_lack_it(
        self, program: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
        with pytest.raises(Unsupported, match=r"does not compute in float16, .*; use bf16"):
            quantize(program, {"image": IMAGES}, config=config(Float16(device="cpu")))

    def test_a_device_that_there_is_not(self) -> None:
        with pytest.raises(InvalidArgument, match="'tpu'; it must be one of cuda, any, cpu"):
            BFloat16(device="tpu")  # type: ignore[arg-type]


class TestRefusals:
    @pytest.mark.parametrize("recipe", [PT2EInt8(), BFloat16(device="cpu")])
    def test_running_the_program_must_be_allowed(self, program: Archive, recipe: Recipe) -> None:
        with pytest.raises(Unsupported, match=r"can run its author's code; .* --allow-code"):
            quantize(program, {"image": IMAGES}, config=config(recipe, allow_code=False))
        with pytest.raises(Unsupported, match="--allow-code"):
            quantize(program, {"image": IMAGES}, config=recipe)

    def test_an_archive_without_a_program(self) -> None:
        graph = export_model(net, inputs=["x:float32[batch,4]"])
        with pytest.raises(InvalidArgument, match="has no variant of format 'pt2': export the model with --to pt2"):
            quantize(graph, {"x": np.ones((20, 4), np.float32)}, config=config(PT2EInt8()))

    def test_an_existing_compiled_variant_is_refused(self, quantized: Archive, compile_at_once: None) -> None:
        with pytest.raises(InvalidArgument, match="has a variant 'int8-aoti' already"):
            quantize(quantized, {"image": IMAGES}, config=config(PT2EInt8()))

    @pytest.mark.usefixtures("compile_at_once")
    def test_slower_or_worse_results_are_refused_unless_forced(
        self, program: Archive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: dict[str, Any] = {"recipe": PT2EInt8(), "allow_code": True, "batches": (1, 4)}
        with pytest.raises(QuantizationError, match=r"'pt2e-int8' loses .* of the metric, more than the 0 allowed"):
            quantize(program, {"image": IMAGES}, config=QuantConfig(**asked, max_drop=0.0))
        time_as(monkeypatch, 0.5)
        with pytest.raises(QuantizationError, match=r"not faster than the original .* \(0.50x at batch 1, .*--force"):
            quantize(program, {"image": IMAGES}, config=QuantConfig(**asked))
        made = quantize(program, {"image": IMAGES}, config=QuantConfig(**asked, max_drop=0.0, force=True))
        assert [variant.name for variant in made.variants] == ["fp32-pt2", "int8-aoti"]
        assert made.variant("int8-aoti").serving.evidence.holds is False


class TestRace:
    def test_models_are_timed_in_another_process(self, program: Archive) -> None:
        variant = program.variant()
        model = (variant.path(), "pt2")
        latencies = Race(
            [model, model], variant.signature, example={"image": IMAGES[:1]}, batches=(1, 4), threads=1, seconds=0.01
        ).run()
        assert [[item.rows for item in timed] for timed in latencies] == [[1, 4], [1, 4]]
        assert all(item.seconds > 0 for timed in latencies for item in timed)

    def test_errors_of_the_timing_process_are_passed_on(
        self, program: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missing = Race([(tmp_path / "none.onnx", "onnx")], program.signature, example={}, batches=(1,))
        with pytest.raises((InvalidArgument, NotFound), match=r"none\.onnx"):
            missing.run()
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho 'MemoryError: no room' >&2\nexit 3\n")
        broken.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(broken))
        with pytest.raises(QuantizationError, match="could not be timed: MemoryError: no room"):
            missing.run()


@pytest.mark.long
def test_from_a_module_to_answers_over_http(run_ingot: RunIngot, tmp_path: Path, require_tool: RequireTool) -> None:
    require_tool("g++")
    pytest.importorskip("torchao")
    rows = RNG.standard_normal((40, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=rows)
    exported = run_ingot(
        "export", "tests.export.models:net", "--input", "x:float32[batch,4]", "--to", "pt2", "-o", "n.ingot"
    )
    assert exported.returncode == 0, exported.stderr
    options = ["--recipe", "pt2e-int8", "--calibrate", "data.npz", "--threads", "1", "--force", "-o", "q.ingot"]
    refused = run_ingot("quantize", "n.ingot", *options)
    assert (refused.returncode, (tmp_path / "q.ingot").exists()) == (1, False)
    assert "--allow-code" in refused.stderr
    made = run_ingot("quantize", "n.ingot", *options, "--allow-code")
    assert made.returncode == 0, made.stderr
    assert "int8-aoti" in made.stdout
    archive = Archive.open(tmp_path / "q.ingot").unpacked()
    expected = answer(archive, "fp32-pt2", {"x": rows[:3]})
    arguments = (f"{tmp_path / 'q.ingot'}#int8-aoti", "--allow-code", "--device", "cpu")
    with running(*arguments, home=tmp_path) as (_, addresses), Client(addresses["http"]) as client:
        name = addresses["models"][0]["name"]
        answers = client.infer(name, {"x": rows[:3]})
    assert np.linalg.norm(next(iter(answers.values())) - expected) < 0.1 * np.linalg.norm(expected)
