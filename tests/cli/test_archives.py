"""``ingot export``, ``quantize``, ``inspect``, ``push`` and ``list`` as a user types them, each in its own process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.demo import Data, Digits
from ingot.model_store import Archive
from tests import onnx_models
from tests.server import test_image_steps, test_steps
from tests.steps.bert import tokenizer_file
from tests.support import RunIngot, refused, run_in_process, succeeded


@pytest.mark.matrix
def test_the_way_by_hand(digits: tuple[Digits, Data, Data], run_ingot: RunIngot, tmp_path: Path) -> None:
    model, training, _ = digits
    torch.save(model.state_dict(), tmp_path / "digits.pth")
    np.savez(tmp_path / "digits.npz", image=training.images[:200], label=training.labels[:200])
    spec = "image:float32[batch,1,8,8]"

    source = ["export", "examples.digits:model", "--input", spec, "--output-name", "logits"]
    exported = run_ingot(*source, "--checkpoint", "digits.pth", "--name", "digits", "-o", "digits.ingot")
    assert succeeded(exported).startswith("digits.ingot: digits, fp32, ")
    assert "logits: equals the original in 7 cases" in exported.stderr

    # Forced: on a busy machine, such a small model may not be found faster, and then comes second.
    recipe = ("--recipe", "static-int8", "--max-drop", "0.1", "--force")
    command = ["quantize", "digits.ingot", "--calibrate", "digits.npz", *recipe, "-o", "digits-int8.ingot", "--json"]
    described = json.loads(succeeded(run_ingot(*command)))
    assert described.pop("verdict") == "quantized"
    assert {"reason", "report"} <= set(described)
    del described["reason"], described["report"]
    variants = {variant["variant"]: variant for variant in described["variants"]}
    assert set(variants) == {"int8", "fp32"}
    assert variants["int8"]["evidence"]["agreement"][0]["top1"] > 0.95
    assert [line for line in variants["fp32"]["evidence"]["deviations"] if line.startswith("max_pool2d (digits.py:")]

    shown = succeeded(run_ingot("inspect", "digits-int8.ingot"))
    names = "int8", "fp32", "top", "memory plan", "stated bound: max_pool2d"
    for part in (f"digits  {described['digest']}", f"input  {spec}", "logits:float32[batch,10]", *names):
        assert part in shown
    assert json.loads(succeeded(run_ingot("inspect", "digits-int8.ingot", "--json"))) == described

    line = f"digits:1  {described['digest']}\n"
    assert succeeded(run_ingot("copy", "digits-int8.ingot", "digits:1")) == line
    assert succeeded(run_ingot("copy", "digits-int8.ingot", "digits:1")) == line
    message = refused(run_ingot("copy", "digits.ingot", "digits:1"))
    assert "a version never changes; copy it as another version, such as digits:2" in message
    pushed = json.loads(succeeded(run_ingot("copy", "digits.ingot", "digits:2", "--json")))
    exported_archive = Archive.open(tmp_path / "digits.ingot")
    assert (pushed["reference"], pushed["digest"]) == ("digits:2", exported_archive.digest)
    assert pushed["moved"] + pushed["present"] == pushed["size"] == exported_archive.size

    assert succeeded(run_ingot("store", "list")).splitlines()[0] == line.strip()
    assert [(item["name"], item["tag"]) for item in json.loads(succeeded(run_ingot("store", "list", "--json")))] == [
        ("digits", "1"),
        ("digits", "2"),
    ]
    assert json.loads(succeeded(run_ingot("inspect", "digits:1", "--json"))) == described


@pytest.mark.matrix
def test_an_onnx_file_to_json_and_another_store(run_ingot: RunIngot, tmp_path: Path) -> None:
    onnx_models.unbatched(tmp_path)
    exported = json.loads(succeeded(run_ingot("export", "unbatched.onnx", "-o", "u[red].ingot", "--json")))
    assert exported["name"] == "unbatched"
    assert exported["variants"][0]["signature"]["batch"] is None
    shown = succeeded(run_ingot("inspect", "u[red].ingot"))
    assert "none: one request at a time" in shown
    store = tmp_path / "elsewhere"
    succeeded(run_ingot("copy", "u[red].ingot", "team/unbatched:prod", "--store", store))
    assert succeeded(run_ingot("store", "list")) == ""
    assert succeeded(run_ingot("store", "list", "--store", store)) == f"team/unbatched:prod  {exported['digest']}\n"


class TestRefusedExports:
    """One process each, and each imports torch: other refusals are tested in tests/export."""

    def test_a_model_whose_example_does_not_run(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        command = ["export", "tests.export.models:net", "--input", "x:float32[batch,5]", "-o", "net.ingot"]
        message = refused(run_ingot(*command))
        assert message.startswith("the model does not run on the example inputs (x [3, 5]): RuntimeError")
        assert message.endswith("it runs with x:float32[batch,4]: declare it that way")
        assert not (tmp_path / "net.ingot").exists()

    @pytest.mark.matrix
    def test_a_model_that_torch_cannot_capture(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        (tmp_path / "branching.py").write_text(
            "import torch\n"
            "class Net(torch.nn.Module):\n"
            "    def forward(self, x):\n"
            "        return x if x.sum() > 0 else -x\n"
        )
        result = run_ingot("export", "branching:Net", "--input", "x:float32[batch,4]", "-o", "net.ingot")
        assert result.returncode == 1
        message, _, detail = result.stderr.partition("\n")
        assert message.startswith("error: torch.export cannot capture the model: its code branches on the values")
        assert "branching.py:4 in forward\n" in detail
        assert "Remedy: use torch.where" in detail
        assert "    return torch.cond(x.sum() > 0, lambda: x.clone(), lambda: -x)" in detail
        assert [result.stderr.count(text) for text in ("its code branches", "in forward", "torch.where")] == [1, 1, 1]

    def test_a_checkpoint_with_code_in_it(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        (tmp_path / "c.pkl").write_bytes(pickle.dumps({"weight": Path}))
        command = ["export", "tests.export.models:Net", "--checkpoint", "c.pkl", "-o", "net.ingot"]
        assert "could run code" in refused(run_ingot(*command, "--input", "x:float32[batch,4]"))

    def test_a_model_that_is_not_there(self, run_ingot: RunIngot) -> None:
        message = refused(run_ingot("export", "nowhere:Net", "--input", "x:float32[batch,4]", "-o", "net.ingot"))
        assert message.startswith("there is no Python module 'nowhere' here")

    def test_an_unwritable_output_is_refused_before_the_work(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        for out, why in (("nowhere/x.ingot", "there is no folder nowhere"), ("folder", "it is a folder; name a file")):
            assert why in refused(run_ingot("export", "nowhere:Net", "-o", out))
            assert why in refused(run_ingot("quantize", "x.ingot", "--calibrate", "x.npz", "-o", out))


@pytest.mark.matrix
def test_a_folder_that_is_not_writable(run_ingot: RunIngot, tmp_path: Path) -> None:
    onnx_models.affine(tmp_path)
    assert "cannot write /proc/x.ingot" in refused(run_ingot("export", "affine.onnx", "-o", "/proc/x.ingot"))


class TestRefusedArchives:
    @pytest.fixture
    def archive(self, digits_fp32: Path, tmp_path: Path) -> Path:
        path = tmp_path / "digits.ingot"
        path.write_bytes(digits_fp32.read_bytes())
        return path

    @pytest.mark.one_case
    @pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty"])
    def test_a_damaged_archive(self, run_ingot: RunIngot, archive: Path, damage: str) -> None:
        good = archive.read_bytes()
        middle = len(good) // 2  # inside the weights
        archive.write_bytes(
            {
                "cut": good[:middle],
                "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
                "text": b"no archive at all\n",
                "empty": b"",
            }[damage]
        )
        commands = [("inspect", archive), ("copy", archive, "digits:1"), ("serve", archive, "--http-port", "0")]
        for command in commands if damage == "flipped" else commands[:1]:
            assert any(word in refused(run_ingot(*command)) for word in ("damaged", "truncated"))
        assert succeeded(run_ingot("store", "list")) == ""

    def test_calibration_data_that_does_not_fit(self, run_ingot: RunIngot, archive: Path, tmp_path: Path) -> None:
        np.savez(tmp_path / "bad.npz", pixels=np.zeros((3, 1, 8, 8), np.float32))
        result = run_ingot("quantize", archive, "--calibrate", "bad.npz", "-o", "q.ingot")
        assert (result.returncode, result.stdout) == (1, "")
        message = "error: the calibration data in bad.npz lacks the input 'image'; it contains: pixels"
        assert result.stderr.splitlines()[-1] == message

    @pytest.mark.one_case
    @pytest.mark.parametrize(
        ("command", "message"),
        [
            (["inspect", "nope.ingot"], "there is no file nope.ingot"),
            (["inspect", "digits:1"], "has no model 'digits'; it holds: nothing yet"),
            (["inspect", "digits 1"], "'digits 1' is not a model reference; write name:tag such as digits:1"),
            (["inspect", "digits.txt"], "for the file of that name write ./digits.txt"),
            (["copy", "nope.ingot", "digits:1"], "there is no file nope.ingot"),
            (["copy", "digits.ingot", "digits"], "write name:tag, such as digits:1"),
            (["copy", "digits.ingot", "digits:1", "--store", "digits.txt"], "the store at digits.txt cannot be"),
            (["store", "list", "--store", "digits.txt"], "the store at digits.txt cannot be read: it is not a folder"),
            (["serve", "digits:1", "--host", "0.0.0.0"], "which other machines may reach, without TLS"),
            (["serve", "digits:1"], "has no model 'digits'"),
            (["serve", "./digits.txt"], "is not an Ingot archive"),
            (["serve", "./bert"], "run ingot export bert -o bert.ingot first, then ingot serve bert.ingot"),
            (["serve", "mine=hub"], "run ingot export hub:ENTRY --input 'NAME:float32[batch,...]' -o hub.ingot first"),
            (["serve", "triton"], "run ingot import triton first, then serve the names that it prints"),
            (["serve", "./x.mar"], "run ingot import x.mar -o x.ingot first, then ingot serve x.ingot"),
            (["serve", "x.pth"], "run ingot export x.pth --input 'NAME:float32[batch,...]' -o x.ingot first"),
            (
                ["serve", "pkg.mod:build"],
                "run ingot export pkg.mod:build --input 'NAME:float32[batch,...]' -o build.ingot first, then ingot "
                "serve build.ingot",
            ),
            (["serve", "here:Net"], "run ingot export here:Net --input"),
            (["serve", "nope.onnx"], "there is no file nope.onnx"),
            (["serve", "./digits.ingot#bf16"], "has no variant 'bf16'; it has: fp32"),
            (["serve", "./digits.ingot", "--http-port", "99999"], "--http-port is 99999"),
            (["serve", "./digits.ingot", "--slo", "10h"], "--slo is '10h': it must be over 0 and at most 1h"),
            (["serve", "./digits.ingot", "--slo", "50"], "--slo is '50': write a unit: 50ms or 50s"),
        ],
    )
    def test_each_with_its_remedy(
        self, monkeypatch: pytest.MonkeyPatch, archive: Path, tmp_path: Path, command: list[str], message: str
    ) -> None:
        # In this process, which saves a second for each: no server is started.
        monkeypatch.setattr("ingot.cli.serving.serve.configure_logging", lambda *_: None)
        monkeypatch.setattr("ingot.server.main.run", lambda *_: pytest.fail("the server was started"))
        files = "digits.txt", "x.mar", "x.pth", "here.py", "bert/config.json", "hub/hubconf.py", "triton/a/config.pbtxt"
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("some text")
        assert message in refused(run_in_process(command, tmp_path, tmp_path / "home"))


class TestReplay:
    def test_steps_and_graph(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        test_steps.make(tmp_path).save(tmp_path / "length.ingot")
        shown = succeeded(run_ingot("inspect", "length.ingot", "--replay"))
        assert " replay  fp32: golden cases: 1, of raw inputs: 1; largest difference 0.0e+00, tolerance 1e-03" in shown
        described = json.loads(succeeded(run_ingot("inspect", "length.ingot#fp32", "--replay", "--json")))
        expected = {"variant": "fp32", "cases": 1, "raw": 1, "largest": 0.0, "tolerance": 1e-3}
        assert described["replayed"] == [expected]
        run_ingot("copy", "length.ingot", "length:1")
        assert " replay  fp32: " in succeeded(run_ingot("inspect", "length:1", "--replay"))

    @pytest.mark.parametrize("fault", ["answer", "tokenizer"])
    def test_steps_that_answer_otherwise(self, run_ingot: RunIngot, tmp_path: Path, fault: str) -> None:
        cased = tokenizer_file().replace(b'"a":', b'"aa":').replace(b'"fine":', b'"a":')
        if fault == "answer":
            archive = test_steps.make(tmp_path, answer=b"OTHER")
        else:
            archive = test_steps.make(tmp_path, tokenizer=cased)
        archive.save(tmp_path / "wrong.ingot")
        where = "after" if fault == "answer" else "before"
        message = refused(run_ingot("inspect", "wrong.ingot", "--replay"))
        assert f"of the steps {where} golden case 0 departs by" in " ".join(message.split())

    def test_pictures_are_decoded_in_another_process(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        test_image_steps.make(tmp_path).save(tmp_path / "colour.ingot")
        assert "of raw inputs: 1" in succeeded(run_ingot("inspect", "colour.ingot", "--replay"))
