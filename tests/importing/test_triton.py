from __future__ import annotations

import contextlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import IngotError, InvalidArgument, NotFound
from ingot.importing import Candidate, Consent, Imported, candidates, import_model
from ingot.importing.pbtxt import read_config
from ingot.importing.record import specs
from ingot.model_store import ServingDefaults
from ingot.tensors import DType, TensorSpec
from tests import onnx_models
from tests.importing.sources import CONFIG, SCRIPT, WEIGHTS, torch_file, triton

TORCH = """
backend: "pytorch"
input [ { name: "INPUT__1" data_type: TYPE_INT64 dims: [ -1 ] }, { name: "INPUT__0" data_type: TYPE_FP16 dims: [ 3 ] } ]
output [ { name: "OUTPUT__1" data_type: TYPE_FP32 }, { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


def listed(path: Path) -> tuple[Candidate, ...]:
    with candidates(path, Consent(allow_code=True)) as found:
        return found


def only(path: Path) -> Imported:
    (candidate,) = listed(path)
    return candidate.read()


class TestWhatIsFound:
    def test_a_model_with_its_versions(self, tmp_path: Path) -> None:
        names = ("1", "10", "2", "0", "01", "v3", "draft")
        triton(tmp_path / "ResNet", files={f"{name}/model.onnx": b"" for name in names})
        found = listed(tmp_path / "ResNet")
        assert [(item.name, item.version) for item in found] == [("resnet", version) for version in ("1", "2", "10")]
        assert found[1].read().file == tmp_path / "ResNet" / "2" / "model.onnx"

    def test_a_repository(self, tmp_path: Path) -> None:
        triton(tmp_path / "a")
        triton(tmp_path / "b", None)
        (tmp_path / "c").mkdir()
        (tmp_path / "note.txt").write_text("")
        assert [(item.name, item.version) for item in listed(tmp_path)] == [("a", "1"), ("b", "1")]

    def test_one_version(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        triton(tmp_path / "a", files={"1/model.onnx": b"", "2/model.onnx": b""})
        monkeypatch.chdir(tmp_path / "a" / "2")
        for path in (tmp_path / "a" / "2", Path()):
            (found,) = listed(path)
            assert (found.name, found.version) == ("a", "2")
            assert found.read().inputs[0].name == "x"

    def test_inputs_as_the_configuration_declares_them(self, tmp_path: Path) -> None:
        found = only(triton(tmp_path / "a"))
        assert specs(found.inputs) == (TensorSpec("x", DType.FP32, ("batch", 3)),)
        assert [item.name for item in found.outputs] == ["y"]
        known = [TensorSpec("x", DType.FP32, ("N", "channels"))]
        anything = CONFIG.replace("[ 3 ]", "[ -1 ]")
        assert specs(only(triton(tmp_path / "a", anything)).inputs, known)[0].shape == ("batch", "channels")
        whole = anything.replace("max_batch_size: 8", "")
        assert specs(only(triton(tmp_path / "a", whole)).inputs)[0].shape == ("x_0",)
        reshaped = CONFIG.replace("dims: [ 3 ] }", "dims: [ 3 ] reshape { shape: [ 1, 3 ] } }", 1)
        found = only(triton(tmp_path / "a", reshaped))
        assert specs(found.inputs)[0].shape == ("batch", 3)
        assert found.inputs[0].inner == (1, 3)
        one = [TensorSpec("x", DType.FP32, (1, 3))]
        assert specs(only(triton(tmp_path / "a")).inputs, one)[0].shape == (1, 3)

    def test_every_form_of_the_text_format(self, tmp_path: Path) -> None:
        config = """
        # a comment
        platform: "onnx" 'runtime' ; max_batch_size: 0x8, unheard_of: 1.5f more [ { a: KIND_CPU }, { } ]
        ensemble_scheduling { step [ { model_name: "a [b" control [ { x: [] } ] } ] }  # it's [ unpaired
        input: < name: 'b\\303\\244' data_type: TYPE_STRING dims: [1, 017] dims: -1 >
        """
        found = only(triton(tmp_path / "a", config))
        assert [str(spec) for spec in specs(found.inputs)] == ["bä:string[batch,1,15,b__3]"]

    def test_torchscript_inputs_are_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        found = only(triton(tmp_path / "a", TORCH, {"1/model.pt": torch_file(*SCRIPT)}))
        assert [str(spec) for spec in specs(found.inputs)] == ["INPUT__0:float16[3]", "INPUT__1:int64[INPUT__1_0]"]
        assert [item.name for item in found.outputs] == ["OUTPUT__0", "OUTPUT__1"]
        assert found.format == "torchscript"

    def test_a_file_of_another_name_or_in_a_folder_with_its_data(self, tmp_path: Path) -> None:
        triton(tmp_path / "a", CONFIG + 'default_model_filename: "net.bin"', {"1/net.bin": b""})
        assert only(tmp_path / "a").file.name == "net.bin"
        triton(tmp_path / "b", files={"1/model.onnx/model.onnx": b"", "1/model.onnx/data": b""})
        assert only(tmp_path / "b").file == tmp_path / "b" / "1" / "model.onnx" / "model.onnx"

    def test_labels_come_along_and_settings_are_named(self, tmp_path: Path) -> None:
        more = "dynamic_batching { } instance_group [ { count: 2 } ] parameters: { key: 'a' } unheard_of { a: [ ] }"
        triton(tmp_path / "a", CONFIG + more)
        (tmp_path / "a" / "labels.txt").write_text("cat")
        (tmp_path / "a" / "warm.bin").write_text("x")
        found = only(tmp_path / "a")
        assert found.documents == {"labels.txt": b"cat"}
        assert found.notes == (
            "max_batch_size 8 is not imported: ingot serve has --max-batch",
            "dynamic_batching is not imported: ingot serve batches requests by itself",
            "instance_group is not imported: see --instances and --device of ingot serve",
            "the parameter 'a' is not imported: it is a setting of Triton's backend",
            "files that are not imported: warm.bin",
        )

    def test_labels_are_names_of_classes_or_a_note(self, tmp_path: Path) -> None:
        labelled = CONFIG.replace('name: "y"', 'name: "y" label_filename: "names.json"')
        assert any(
            "names.json are not imported: there is no" in note for note in only(triton(tmp_path / "a", labelled)).notes
        )
        (tmp_path / "a" / "names.json").write_text('{"0": "cat", "1": "dog"}')
        assert only(tmp_path / "a").serving == ServingDefaults(labels=("cat", "dog"))
        (tmp_path / "a" / "names.json").write_text("3")
        found = only(tmp_path / "a")
        assert found.serving is None
        assert any("must be a list of names" in note for note in found.notes)

    def test_controls_may_have_other_values(self, tmp_path: Path) -> None:
        control = '{ name: "S" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ -1, 1 ] } ] }'
        found = only(triton(tmp_path / "a", f"{CONFIG} sequence_batching {{ control_input [ {control} ] }}"))
        assert found.serving == ServingDefaults(states={"S": "@start:-1:1"})
        assert [str(spec) for spec in specs(found.inputs)] == ["x:float32[batch,3]", "S:float32[batch,1]"]
        known = [TensorSpec("S", DType.FP32, ("n",))]
        assert str(specs(found.inputs, known)[1]) == "S:float32[batch]"

    @pytest.mark.parametrize(
        ("inner", "message"),
        [
            ("2, 3", r"the reshape of 'x' from \[3\] to \[2,3\] is not supported"),
            ("-1", r"from \[3\] to \[-1\] is not supported"),
        ],
    )
    def test_a_reshape_to_another_number_of_elements(self, tmp_path: Path, inner: str, message: str) -> None:
        config = CONFIG.replace("dims: [ 3 ] }", f"dims: [ 3 ] reshape {{ shape: [ {inner} ] }} }}", 1)
        graph = onnx_models.affine(tmp_path).read_bytes()
        with pytest.raises(InvalidArgument, match=message):
            import_model(triton(tmp_path / "a", config, {"1/model.onnx": graph}))

    def test_links_inside_the_folder_are_followed(self, tmp_path: Path) -> None:
        triton(tmp_path / "a", files={"data/model.onnx": b"a graph"})
        (tmp_path / "a" / "1").symlink_to("data")
        assert only(tmp_path / "a").file.read_bytes() == b"a graph"


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("platform", "remedy"),
        [
            ("tensorrt_plan", "import or export its source model"),
            ("python", "it is Python code, which Ingot does not run"),
            ("ensemble", "it combines other models; import those"),
            ("tensorflow_savedmodel", "convert it to ONNX with tf2onnx"),
            ("acme", "import or export its source model"),
        ],
    )
    def test_other_backends(self, tmp_path: Path, platform: str, remedy: str) -> None:
        model = triton(tmp_path / "a", f'platform: "{platform}"', {"1/model.any": b""})
        with pytest.raises(InvalidArgument, match=f"backend '{platform}', which cannot be imported: {remedy}"):
            only(model)

    def test_a_model_of_another_backend_may_have_no_version(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="backend 'ensemble', which cannot be imported"):
            only(triton(tmp_path / "a", 'platform: "ensemble"', {}))

    def test_a_model_without_a_backend(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"neither a backend in config.pbtxt nor a model.onnx or model.pt"):
            only(triton(tmp_path / "a", "", {"1/net.bin": b""}))
        with pytest.raises(InvalidArgument, match="uses Triton's backend 'tensorrt', which cannot be imported"):
            only(triton(tmp_path / "b", None, {"1/model.plan": b""}))

    def test_no_version_and_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="has no version folder, such as a/1"):
            only(triton(tmp_path / "a", files={}))
        with pytest.raises(NotFound, match=r"there is no file .*model.onnx, the model of that version"):
            only(triton(tmp_path / "b", files={"1/other": b""}))

    def test_a_folder_without_models(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"holds no model: neither MAR-INF/MANIFEST.json of TorchServe, nor"):
            listed(tmp_path)

    def test_weights_in_place_of_torchscript(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"model.pt is a pickle of torch.save, not TorchScript"):
            only(triton(tmp_path / "a", TORCH, {"1/model.pt": torch_file(*WEIGHTS)}))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("max_batch_size: many", "config.pbtxt, line 1: Couldn't parse integer: many"),
            ("platform: 3", "config.pbtxt, line 1: Expected string but found: '3'"),
            ("input: 3", 'line 1: Expected "{"'),
            ("input { dims: 3 }", "an input has no name"),
            ('input { name: "x" }', "the input 'x' has no data_type"),
            ('input { name: "x" data_type: TYPE_FP9 }', "has no value named TYPE_FP9"),
            ('input { name: "x" data_type: TYPE_FP32 dims: -2 }', "the dims of the input 'x' must be at most 64 sizes"),
            ('input { name: "x" data_type: TYPE_FP32 dims: "3" }', "line 1: Couldn't parse integer"),
            ('input { name: "x" data_type: TYPE_FP32 dims: [' + "1," * 99 + "1] }", "must be at most 64 sizes"),
            ("input { } " * 1001, "over 1000 inputs or outputs"),
            ("input {" * 1000, "messages are nested too deeply"),
            ("a {" * 1000, "messages are nested too deeply"),
            ("a: 1 " * 1_000_000, "config.pbtxt is larger than 1 MiB"),
            ("a: 1 " * 10_000, "config.pbtxt has a line of over 16 KiB"),
            ("a: 1\nplatform: [", "line 2: Expected string but found: '['"),
            ('sequence_batching { control_input { name: "S" } }', "the control input 'S' has 0 controls, not one"),
            (
                'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } } }',
                "the control input 'S' has no two values, such as int32_false_true: [ 0, 1 ]",
            ),
            (
                'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_CORRID } } }',
                "the control input 'S' has no data_type",
            ),
            (
                'sequence_batching { state { input_name: "h" initial_state { data_file: "h0" } } }',
                "the state 'h' begins with the content of h0, and states begin with zeros here",
            ),
            ("platform: '\\377'", "line 1: Couldn't parse string"),
            ("platform: \x7f", r"Expected string but found: '\x7f'"),
        ],
    )
    def test_a_damaged_configuration(self, tmp_path: Path, config: str, message: str) -> None:
        with pytest.raises(InvalidArgument) as error:
            only(triton(tmp_path / "a", config))
        assert message in str(error.value)

    def test_a_configuration_that_is_not_text(self, tmp_path: Path) -> None:
        triton(tmp_path / "a")
        (tmp_path / "a" / "config.pbtxt").write_bytes(b"\xff")
        with pytest.raises(InvalidArgument, match=r"config.pbtxt is not text: .* at byte 0"):
            only(tmp_path / "a")

    @pytest.mark.matrix
    @given(st.one_of(st.binary(max_size=200), st.text("ab:{}[]<>,;\"'\\#01.-xX eEfu\n", max_size=80).map(str.encode)))
    def test_any_configuration_is_read_or_refused(self, raw: bytes) -> None:
        with TemporaryDirectory() as folder, contextlib.suppress(InvalidArgument):
            (Path(folder) / "config.pbtxt").write_bytes(raw)
            read_config(Path(folder).resolve(), Path(folder).resolve())

    @pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", ".."])
    def test_a_file_name_that_leads_elsewhere(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(InvalidArgument, match=r"calls the model's file .*, which is not a file name"):
            only(triton(tmp_path / "a", CONFIG + f'default_model_filename: "{name}"'))

    @pytest.mark.parametrize("place", ["1/model.onnx", "1", "config.pbtxt", "labels.txt"])
    def test_links_that_lead_out(self, tmp_path: Path, place: str) -> None:
        outside = triton(tmp_path / "outside")
        (outside / "labels.txt").write_text("a secret")
        folder = triton(tmp_path / "a")
        target = folder / place
        if place == "1":
            (target / "model.onnx").unlink()
            target.rmdir()
        target.unlink(missing_ok=True)
        target.symlink_to(outside / place)
        with pytest.raises(InvalidArgument, match=f"{place} is a link that leads out of a; put a copy"):
            only(folder)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        triton(tmp_path / "a", files={"1/x": b""})
        os.mkfifo(tmp_path / "a" / "1" / "model.onnx")
        with pytest.raises(IngotError, match="there is no file"):
            only(tmp_path / "a")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_a_folder_that_cannot_be_read(self, tmp_path: Path) -> None:
        triton(tmp_path / "a").chmod(0)
        with pytest.raises(InvalidArgument, match="cannot be read: Permission denied"):
            only(tmp_path / "a")
