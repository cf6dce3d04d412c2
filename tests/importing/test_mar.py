from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import onnx
import pytest

from ingot.errors import IngotError, InvalidArgument, NotFound
from ingot.importing import Consent, candidates
from ingot.model_store import ServingDefaults
from tests import onnx_models
from tests.importing.sources import COMPILED, PROGRAM, SCRIPT, WEIGHTS, manifest, mar, read, script_mar, tgz, torch_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.mar"


class TestWhatIsFound:
    def test_the_name_and_version_of_the_manifest(self, path: Path) -> None:
        script_mar(path, modelName="Dense Net_161", modelVersion="1.0")
        with candidates(path, Consent(allow_code=True)) as (found,):
            assert (found.name, found.version) == ("dense-net-161", "1.0")

    def test_a_version_may_be_a_number_or_missing(self, path: Path) -> None:
        for given, version in ((2, "2"), (None, None)):
            script_mar(path, modelVersion=given)
            with candidates(path, Consent(allow_code=True)) as (found,):
                assert found.version == version

    def test_the_model_is_there_as_long_as_the_source_is_open(self, path: Path) -> None:
        script_mar(path)
        with candidates(path, Consent(allow_code=True)) as (candidate,):
            found = candidate.read()
            assert found.file.read_bytes() == torch_file(*SCRIPT)
            assert found.format == "torchscript"
            assert found.called == f"'net.pt' in {path}"
        assert not found.file.exists()

    def test_a_tar_has_a_folder_around_its_files(self, tmp_path: Path) -> None:
        files = {
            "net/MAR-INF/MANIFEST.json": manifest(modelName="net", serializedFile="net.pt"),
            "./net/net.pt": torch_file(*SCRIPT),
            "net/labels.json": b"{}",
        }
        assert read(tgz(tmp_path / "net.tar.gz", files)).documents == {"labels.json": b"{}"}

    def test_a_folder_that_an_archive_is_made_of(self, tmp_path: Path) -> None:
        (tmp_path / "net" / "MAR-INF").mkdir(parents=True)
        (tmp_path / "net" / "MAR-INF" / "MANIFEST.json").write_bytes(manifest(modelName="n", serializedFile="a.pt"))
        (tmp_path / "net" / "a.pt").write_bytes(torch_file(*SCRIPT))
        assert read(tmp_path / "net").format == "torchscript"

    def test_names_of_classes_are_those_of_the_server(self, tmp_path: Path) -> None:
        names = b'{"1": ["n02", "dog"], "0": ["n01", "cat"]}'
        found = read(script_mar(tmp_path / "net.mar", {"index_to_name.json": names}))
        assert found.serving == ServingDefaults(labels=("cat", "dog"))
        found = read(script_mar(tmp_path / "other.mar", {"index_to_name.json": b"["}))
        assert found.serving is None
        assert any("the labels in index_to_name.json cannot be read" in note for note in found.notes)

    def test_small_data_is_included_and_the_rest_is_named(self, path: Path) -> None:
        files = {f"labels{index:02}.txt": b"a" for index in range(40)}
        found = read(script_mar(path, {"index_to_name.json": b"{}", "big.csv": b"1" * (1 << 20) + b"1", **files}))
        assert len(found.documents) == 32
        assert found.documents["index_to_name.json"] == b"{}"
        (note,) = found.notes
        assert note.startswith("files that are not imported: big.csv, labels31.txt, ")
        assert note.endswith(" and 2 more")

    def test_notes_say_what_clients_and_the_server_must_do(self, path: Path) -> None:
        config = b"minWorkers: 1\nbatchSize: 4\nbatchSize: 5\nhandler:\n  topk: 5\n"
        model = {"handler": "image_segmenter", "configFile": "model-config.yaml", "requirementsFile": "r.txt"}
        found = read(script_mar(path, {"model-config.yaml": config}, **model), without_handler=True)
        handler, packages, settings = found.notes
        assert "image_segmenter is not imported: clients must decode images, resize to 256, crop to 224" in handler
        assert "the packages of r.txt are not installed" in packages
        assert "settings in model-config.yaml are not imported: minWorkers, batchSize;" in settings
        assert set(found.documents) == {"model-config.yaml"}

    def test_an_onnx_model_with_its_data(self, path: Path, tmp_path: Path) -> None:
        model = onnx.load(onnx_models.affine(tmp_path))
        onnx.save(model, tmp_path / "a.onnx", save_as_external_data=True, location="a.bin", size_threshold=0)
        files = {name: (tmp_path / name).read_bytes() for name in ("a.onnx", "a.bin")}
        mar(path, files, serializedFile="a.onnx")
        with candidates(path, Consent(allow_code=True)) as (candidate,):
            found = candidate.read()
            assert found.format == "onnx"
            assert (found.file.parent / "a.bin").read_bytes() == files["a.bin"]
            assert found.notes == ()


class TestCode:
    FILES: ClassVar = {
        "w.pth": torch_file(*WEIGHTS),
        "model.py": b"import side",
        "side.py": b"",
        "not a module.py": b"",
    }

    def test_a_handler_is_left_behind_only_by_consent(self, path: Path) -> None:
        script_mar(path, {"h.py": b""}, handler="h.py:entry")
        with pytest.raises(
            InvalidArgument, match=r"own handler, 'h.py:entry': Python .* --allow-code .* --without-handler"
        ):
            read(path, allow_code=False)
        notes = read(path, without_handler=True).notes
        assert notes[0].startswith(
            "the handler h.py:entry is not imported: clients must do its pre- and postprocessing"
        )
        assert notes[1] == "files that are not imported: h.py"

    def test_all_that_a_custom_handler_needs_is_in_one_error(self, path: Path) -> None:
        files = {
            "h.py": b"import no_such_package, side\nimport ts.context\ntry:\n    import other\nexcept: pass\n",
            "side.py": b"",
            "r.txt": b"numpy==0.1\nonnx>=1\nno-such-package==1.0\ngit+https://h/x\n",
            "c.yaml": b"a: &a 1\nb: *a\n",
        }
        model = {"handler": "h.py:f", "requirementsFile": "r.txt", "configFile": "c.yaml", "serializedFile": "w.pt"}
        with pytest.raises(InvalidArgument) as caught:
            read(mar(path, files, **model), allow_code=False)
        consent, file, versions, packages, config = str(caught.value).split("; also, ")
        for part in ("'h.py:f': Python code", "--allow-code", "--without-handler"):
            assert part in consent
        assert "names 'w.pt', which is not in the archive" in file
        assert "r.txt does not state a version of 'onnx>=1' (1." in versions
        assert "'git+https://h/x'" in versions
        assert "numpy==0.1 (2." in packages
        assert "no-such-package==1.0 (it is not installed)" in packages
        assert config == "c.yaml is not valid: it has aliases"
        mar(path, {**files, "r.txt": b"", "c.yaml": b"- 1"}, **model)
        with pytest.raises(
            InvalidArgument, match=r"not installed here: pip install no_such_package; also, c.yaml .*mapping"
        ):
            read(path)

    def test_a_custom_handler_keeps_its_files(self, path: Path) -> None:
        files = {"h.py": b"", "d/a.bin": b"a", "c.yaml": b"batchSize: 4\nresponseTimeout: 9\nminWorkers: 2\n"}
        mar(path, files, handler="sub/h:entry", configFile="c.yaml")
        with candidates(path, Consent(allow_code=True, permissions=("network",))) as (candidate,):
            found = candidate.read()
            custom = found.custom
            assert custom is not None
            assert (custom.file, custom.function, custom.permissions) == ("h.py", "entry", ("network",))
            assert (custom.folder / "d" / "a.bin").read_bytes() == b"a"
            assert found.notes == (
                "the handler gets at most 4 requests at once (batchSize)",
                "the server's settings in the model's configuration are not imported; serve it with --instances 2 "
                "--engine-timeout 9s",
            )

    def test_a_model_in_python_needs_trust(self, path: Path) -> None:
        mar(path, self.FILES, serializedFile="w.pth", modelFile="model.py")
        with pytest.raises(
            InvalidArgument, match=r"weights alone: the model is Python code, 'model.py'.*allow it with --allow-code"
        ):
            read(path, allow_code=False)
        with candidates(path, Consent(allow_code=True)) as (candidate,):
            found = candidate.read()
            assert found.format == "state_dict"
            assert found.code is not None
            assert {file.name for file in found.code.parent.iterdir()} == {"model.py", "side.py"}
            assert found.notes == ("files that are not imported: not a module.py",)

    def test_code_that_is_not_there(self, path: Path) -> None:
        mar(path, self.FILES, serializedFile="w.pth", modelFile="../model.py")
        with pytest.raises(InvalidArgument, match=r"names the model's code '../model.py', which is not in it"):
            read(path, allow_code=True)

    def test_torchscript_needs_trust(self, path: Path) -> None:
        mar(path, {"model.pt": torch_file(*SCRIPT)}, serializedFile="model.pt")
        with pytest.raises(InvalidArgument, match=r"is TorchScript, a program, .*allow it with --allow-code"):
            read(path, allow_code=False)
        assert read(path).format == "torchscript"

    def test_an_exported_program_needs_trust(self, path: Path) -> None:
        mar(path, {"a.pt2": torch_file(*PROGRAM)}, serializedFile="a.pt2")
        with pytest.raises(
            InvalidArgument, match=r"'a.pt2' in .* can run code that it holds; .*allow it with --allow-code"
        ):
            read(path, allow_code=False)
        assert read(path, allow_code=True).format == "pt2"

    @pytest.mark.parametrize("name", ["a.pt2", "a.so"])
    def test_native_code_is_not_a_model(self, path: Path, name: str) -> None:
        mar(path, {name: torch_file(*COMPILED)}, serializedFile=name)
        with pytest.raises(InvalidArgument, match=r"is compiled.* native code without its source model"):
            read(path, allow_code=True)


class TestWhatIsRefused:
    @pytest.mark.parametrize("content", [torch_file(*WEIGHTS), b"\x80\x02}q\x00."], ids=["zip", "legacy"])
    def test_a_pickle_in_place_of_torchscript(self, path: Path, content: bytes) -> None:
        with pytest.raises(InvalidArgument, match=r"'net.pt' in .* is a pickle of torch.save, not TorchScript"):
            read(script_mar(path, {"net.pt": content}))

    def test_another_file_in_place_of_torchscript(self, path: Path) -> None:
        with pytest.raises(
            InvalidArgument, match=r"is not TorchScript, or is damaged; save the model with torch.jit.save"
        ):
            read(script_mar(path, {"net.pt": b"text"}))
        with pytest.raises(InvalidArgument, match=r"is not TorchScript but a program of torch.export; name it .pt2"):
            read(script_mar(path, {"net.pt": torch_file(*PROGRAM)}))

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (b"{", "MANIFEST.json of .* is not valid: Invalid JSON"),
            (b"[" * 100_000, "is not valid"),
            (b"\xff\xfe", "is not valid"),
            (b"{}", "is not valid at 'model': Field required"),
            (
                b'{"model": {"handler": "x"}}',
                "is not valid at 'model.modelName': Field required; create the archive again",
            ),
            (b'{"model": {"modelName": ["a"]}}', "is not valid at 'model.modelName'"),
            (b" " * (1 << 20) + b"{}", "'MAR-INF/MANIFEST.json' in .* is larger than 1024 KiB"),
        ],
        ids=["cut", "deep", "no-text", "empty", "no-name", "list", "large"],
    )
    def test_a_damaged_manifest(self, path: Path, raw: bytes, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            read(mar(path, {"MAR-INF/MANIFEST.json": raw}))

    def test_an_archive_of_something_else(self, path: Path) -> None:
        path.write_bytes(torch_file(*SCRIPT))
        with pytest.raises(InvalidArgument, match=r"not a model archive of TorchServe: it has no MAR-INF"):
            read(path)

    def test_two_archives_in_one(self, path: Path) -> None:
        with pytest.raises(InvalidArgument, match="holds 2 model archives; import one at a time"):
            read(script_mar(path, {"other/MAR-INF/MANIFEST.json": b"{}"}))

    def test_a_manifest_without_a_model_or_with_one_that_is_not_there(self, path: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"holds no serialized model .* its handler makes one in code"):
            read(mar(path, {"h.py": b""}, handler="h.py"), without_handler=True)
        for name in ("other.pt", "../../etc/passwd", "/etc/passwd"):
            with pytest.raises(InvalidArgument, match=f"names the model '{name}', which is not in it"):
                read(script_mar(path, serializedFile=name))

    @pytest.mark.parametrize("location", ["../a.bin", "/etc/passwd", "missing.bin"])
    def test_an_onnx_model_with_external_data(self, path: Path, tmp_path: Path, location: str) -> None:
        model = onnx.load(onnx_models.affine(tmp_path))
        for tensor in model.graph.initializer:
            onnx.external_data_helper.set_external_data(tensor, location)
            tensor.ClearField("raw_data")
        mar(path, {"a.onnx": model.SerializeToString()}, serializedFile="a.onnx")
        with pytest.raises(NotFound, match=f"'a.onnx' in .* has tensors in the file '{location}', which is not in the"):
            read(path)

    def test_a_damaged_onnx_model_is_called_what_the_archive_calls_it(self, path: Path) -> None:
        with pytest.raises(IngotError, match=r"'a.onnx' in .*net.mar is not an ONNX model"):
            read(mar(path, {"a.onnx": b"text"}, serializedFile="a.onnx"))

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.ingot", b"", "already an Ingot archive; ingot copy stores it"),
            ("a.pt", b"PK", "a saved model without an archive: ingot export converts it"),
            ("a.mar", b"text", "cannot be imported: expected an .onnx file, a .mar or .war file of TorchServe"),
            ("a.mar", b"", "cannot be imported: expected"),
        ],
    )
    def test_a_file_that_is_not_a_source(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidArgument, match=message):
            read(tmp_path / name)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="there is no file or folder"):
            read(tmp_path / "none.mar")
