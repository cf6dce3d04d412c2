from __future__ import annotations

import importlib.util
import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument, NotFound
from ingot.export import load_source
from tests.export import models

HERE = "tests.export.models"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return models.Net().state_dict()


def loaded(checkpoint: Path) -> dict[str, torch.Tensor]:
    module = load_source(f"{HERE}:Net", checkpoint)
    assert isinstance(module, nn.Module)
    return module.state_dict()


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


class TestImportPath:
    def test_a_module_a_class_and_a_factory(self) -> None:
        assert load_source(f"{HERE}:net") is models.net
        assert isinstance(load_source(f"{HERE}:Net"), models.Net)
        assert isinstance(load_source(f"{HERE}:factory"), models.Net)
        assert load_source(f"{HERE}:net.body") is models.net.body

    def test_a_class_without_a_checkpoint_is_noted(self) -> None:
        remarks: list[str] = []
        for name in ("net", "factory", "Net"):
            load_source(f"{HERE}:{name}", remark=remarks.append)
        assert remarks == ["without --checkpoint, the weights are those that Net() creates"]

    def test_only_exportable_names_are_listed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code = (
            "import torch\nfrom torch import nn\nfrom pathlib import Path\nfrom torch.nn import Linear\n"
            "class K(nn.Module): pass\nclass Options: pass\ndef make(): return K()\nlayer = Linear(2, 2)\nwidth = 3\n"
        )
        (tmp_path / "listed_net.py").write_text(code, encoding="utf-8")
        (tmp_path / "empty_net.py").write_text("import torch\n", encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        for source, known in (
            ("listed_net:Q", "it has: K, layer, make"),
            ("empty_net:Q", "it has: nothing that can be exported"),
            (f"{HERE}:net.nope", "it has: body"),
        ):
            with pytest.raises(NotFound) as caught:
                load_source(source)
            assert str(caught.value).endswith(known)

    @pytest.mark.parametrize(
        ("source", "kind", "message"),
        [
            ("tests.export.models", InvalidArgument, r"write package\.module:attribute"),
            ("model.pkl", InvalidArgument, r"write package\.module:attribute"),
            (f"{HERE}:", InvalidArgument, r"write package\.module:attribute"),
            (":net", InvalidArgument, "importing  failed"),
            ("no_such_module:net", NotFound, "there is no Python module 'no_such_module' here"),
            ("tests.no_such:net", NotFound, r"there is no Python module 'tests\.no_such' here"),
            (f"{HERE}:nope", NotFound, "has no attribute 'nope'; it has: .*Net"),
            (f"{HERE}:number.nope", NotFound, r"has no attribute 'number\.nope'"),
            (f"{HERE}:number", InvalidArgument, "is a int, not a module, a class or a factory"),
            (f"{HERE}:Served", InvalidArgument, r"name its file: \./\S*models\.py:Served"),
            ("./no_folder", NotFound, r"there is no file or folder \./no_folder"),
            (f"{HERE}:wrong", InvalidArgument, r"wrong\(\) returned a int, not a torch\.nn\.Module"),
            (f"{HERE}:needy", InvalidArgument, r"calling needy\(width: 'int'\) .* without arguments failed: TypeError"),
            (f"{HERE}:failing", InvalidArgument, "failed: RuntimeError: no weights here see the manual; name"),
            ("builtins:range", InvalidArgument, r"calling range\(\.\.\.\) without arguments failed"),
        ],
    )
    def test_each_wrong_one_is_explained(self, source: str, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message) as caught:
            load_source(source)
        assert "\n" not in str(caught.value)


class TestOwnFile:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.curdir)])
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            del sys.modules[name]

    def test_a_file_in_the_current_folder_is_found(self) -> None:
        Path("my_model_beside.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
        assert isinstance(load_source("my_model_beside:net"), nn.Linear)

    def test_a_folder_named_as_a_package_does_not_hide_it(self) -> None:
        Path("triton").mkdir()
        Path("triton/config.pbtxt").touch()
        Path("net_beside.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
        assert isinstance(load_source("net_beside:net"), nn.Linear)
        found = importlib.util.find_spec("triton")
        assert found is None or str(Path.cwd()) not in str(found)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("./gnn.py:Gnn", "write its import path: gnn:Gnn$"),
            ("gnn.py:Gnn", "write its import path: gnn:Gnn$"),
            ("gnn.py", "write its import path: gnn:NAME, where NAME"),
            ("nets/gnn.py:Gnn", r"write its import path: nets\.gnn:Gnn$"),
            ("./absent.py:Gnn", r"there is no file absent\.py"),
        ],
    )
    def test_a_file_is_answered_with_its_import_path(self, source: str, message: str) -> None:
        Path("nets").mkdir()
        for path in ("gnn.py", "nets/gnn.py"):
            Path(path).write_text("from torch import nn\nGnn = nn.Linear(2, 2)\n")
        with pytest.raises((InvalidArgument, NotFound), match=message):
            load_source(source)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("import yam\n", "importing yam_model failed: No module named 'yam'; install the package that it needs"),
            ("def (\n", "importing yam_model failed: SyntaxError"),
            ("raise RuntimeError('a\\n\\nb')\n", "importing yam_model failed: RuntimeError: a b"),
        ],
    )
    def test_a_file_that_does_not_import_is_refused_with_the_reason(self, content: str, message: str) -> None:
        Path("yam_model.py").write_text(content)  # its name begins as the missing package's does
        with pytest.raises(InvalidArgument, match=message):
            load_source("yam_model:net")


class TestCheckpoint:
    def test_its_weights_are_loaded_from_every_usual_form(
        self, weights: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        parallel = {f"module.{key}": value for key, value in weights.items()}
        for content in (
            weights,
            parallel,
            {"epoch": 3, "state_dict": weights, "optimizer": {"lr": 0.1}},
            {"model_state_dict": parallel, "loss": 0.5},
            {"model": weights},
        ):
            for name in ("c.pth", "c.pt", "c.pkl"):
                torch.save(content, tmp_path / name)
                assert equal(loaded(tmp_path / name), weights)

    def test_the_form_from_before_pytorch_1_6(self, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
        torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
        assert equal(loaded(tmp_path / "old.pth"), weights)

    def test_code_in_a_pickle_is_never_run(self, tmp_path: Path) -> None:
        class Payload:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "ran",)

        for name, write in (("zip.pth", torch.save), ("plain.pkl", plain)):
            write({"weight": Payload()}, tmp_path / name)
            with pytest.raises(InvalidArgument, match=r"could run code .* save model\.state_dict\(\) instead"):
                loaded(tmp_path / name)
        assert not (tmp_path / "ran").exists()

    def test_a_whole_pickled_module_is_refused(self, tmp_path: Path) -> None:
        torch.save(models.Net(), tmp_path / "whole.pth")
        with pytest.raises(InvalidArgument, match="contains more than tensors"):
            loaded(tmp_path / "whole.pth")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({}, "does not contain a state_dict; it contains: nothing"),
            ([1, 2], "does not contain a state_dict; it contains: list"),
            (torch.ones(3), "does not contain a state_dict; it contains: Tensor"),
            ({"epoch": 1, "loss": 0.5}, "does not contain a state_dict; it contains: epoch, loss"),
            ({0: torch.ones(1)}, "does not contain a state_dict; it contains: 0"),
            ({"body.0.weight": torch.ones(8, 4)}, "does not fit Net: .*Missing key"),
            ({"extra": torch.ones(1), **models.net.state_dict()}, 'does not fit Net: .*Unexpected key.*"extra"'),
            ({**models.net.state_dict(), "body.0.weight": torch.ones(8, 5)}, "size mismatch for body.0.weight"),
        ],
    )
    def test_mismatched_weights_are_named(self, content: object, message: str, tmp_path: Path) -> None:
        torch.save(content, tmp_path / "c.pth")
        with pytest.raises(InvalidArgument, match=message) as caught:
            loaded(tmp_path / "c.pth")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("prefix", "remark"),
        [
            ("model.", "removed the prefix 'model.' of all keys"),  # Lightning's, of the attribute with the network
            ("module.", "removed the prefix 'module.' of all keys"),
            ("_orig_mod.", "removed the prefix '_orig_mod.' of all keys"),
            ("module._orig_mod.net.", "removed the prefix 'module.net.' of all keys"),
        ],
    )
    def test_a_prefix_of_all_keys_is_removed_with_a_note(
        self, weights: dict[str, torch.Tensor], tmp_path: Path, prefix: str, remark: str
    ) -> None:
        torch.save({"state_dict": {f"{prefix}{key}": value for key, value in weights.items()}}, tmp_path / "c.ckpt")
        remarks: list[str] = []
        module = load_source(f"{HERE}:Net", tmp_path / "c.ckpt", remark=remarks.append)
        assert isinstance(module, nn.Module)
        assert equal(module.state_dict(), weights)
        assert remarks == [f"{remark} of {tmp_path / 'c.ckpt'}"]

    def test_a_prefix_of_some_keys_is_named(self, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
        torch.save(
            {"loss.weight": torch.ones(2), **{f"model.{key}": value for key, value in weights.items()}},
            tmp_path / "c.ckpt",
        )
        with pytest.raises(InvalidArgument, match=r"only its keys under 'model\.' fit; save those alone"):
            loaded(tmp_path / "c.ckpt")

    def test_mismatched_weights_under_a_prefix_are_named(
        self, weights: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        first, *others = weights
        for change, message in (
            ({key: weights[key] for key in others}, f"these are missing: {first}$"),
            ({**weights, first: torch.ones(8, 5)}, rf"model\.{first} has the shape \[8, 5\], not \[8, 4\]$"),
        ):
            state = {f"model.{key}": value for key, value in change.items()}
            torch.save({"loss.weight": torch.ones(2), **state}, tmp_path / "c.ckpt")
            with pytest.raises(
                InvalidArgument, match=rf"most of its keys under 'model\.' fit, but {message[:7]}"
            ) as one:
                loaded(tmp_path / "c.ckpt")
            assert re.search(message, str(one.value))
        torch.save({f"model.{key}": weights[key] for key in others}, tmp_path / "c.ckpt")
        with pytest.raises(InvalidArgument, match=f'Missing key.*: "{first}"') as caught:
            loaded(tmp_path / "c.ckpt")
        assert "Unexpected" not in str(caught.value)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_torchscript_is_a_separate_source(self, tmp_path: Path) -> None:
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "model.pt")
        with pytest.raises(
            InvalidArgument, match=r"a TorchScript file, .* export it directly: ingot export .*model\.pt$"
        ):
            loaded(tmp_path / "model.pt")

    def test_weights_are_not_a_source(self, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
        for name in ("last.ckpt", "net.pt", "net.pth"):
            torch.save(weights, tmp_path / name)
            with pytest.raises(InvalidArgument, match=r"with --checkpoint: ingot export my_model:Net --checkpoint .*t"):
                load_source(str(tmp_path / name))

    def test_a_compiled_part_of_a_model(self, tmp_path: Path) -> None:
        net = models.Net()
        state = {key.replace("body.", "body._orig_mod.", 1): value for key, value in net.state_dict().items()}
        torch.save(state, tmp_path / "c.pth")
        assert equal(loaded(tmp_path / "c.pth"), net.state_dict())

    def test_damaged_files_and_other_files(self, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
        path = tmp_path / "c.pth"
        torch.save(weights, path)
        good = path.read_bytes()
        torch.save(weights, path, _use_new_zipfile_serialization=False)
        old = path.read_bytes()
        cut = r"c\.pth is truncated or damaged: its end is missing; copy or download it again"
        cases = [(b"", r"c\.pth is empty"), (b"hello world", r"c\.pth is not"), (bytes(100) + good[100:], r"c\.pth")]
        cases += [(good[:length], cut) for length in (2, 30, 2000, len(good) // 2, len(good) - 1)]
        cases += [(old[:length], r"c\.pth is (truncated|not a PyTorch)") for length in (1, 3, 30, len(old) - 1)]
        for content, message in [*cases, (b"PK\x03\x04" + bytes(99), cut)]:
            path.write_bytes(content)
            with pytest.raises(InvalidArgument, match=message):
                loaded(path)
        with pytest.raises(NotFound, match="there is no checkpoint"):
            loaded(tmp_path / "nope.pth")
        with pytest.raises(NotFound, match="there is no checkpoint"):
            loaded(tmp_path)

    @pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
    def test_a_device_that_is_not_there(self, weights: dict[str, torch.Tensor], tmp_path: Path, device: str) -> None:
        torch.save(weights, tmp_path / "c.pth")
        with pytest.raises(InvalidArgument, match=f"cannot be loaded to '{device}' here"):
            load_source(f"{HERE}:Net", tmp_path / "c.pth", device)


def plain(content: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def torchscript(module: nn.Module, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated; people's files are still there
        torch.jit.save(torch.jit.script(module.eval()), path)
    return path


class TestFiles:
    def test_an_onnx_file_is_its_path(self, tmp_path: Path) -> None:
        (tmp_path / "x.onnx").write_bytes(b"")
        assert load_source(str(tmp_path / "x.onnx")) == tmp_path / "x.onnx"

    def test_a_torchscript_file_is_a_module(self, tmp_path: Path) -> None:
        path = torchscript(models.Net(), tmp_path / "x.pt")
        module = load_source(str(path))
        assert isinstance(module, torch.jit.ScriptModule)

    @pytest.mark.parametrize("name", ["x.onnx", "x.pt", "x.pth"])
    def test_a_missing_file_is_not_found(self, name: str) -> None:
        with pytest.raises(NotFound, match=f"there is no file {name}"):
            load_source(name)

    def test_a_state_dict_is_answered_with_the_command_that_accepts_it(
        self, weights: dict[str, torch.Tensor], tmp_path: Path
    ) -> None:
        torch.save(weights, tmp_path / "x.pth")
        with pytest.raises(InvalidArgument, match=r"ingot export my_model:Net --checkpoint x\.pth"):
            load_source(str(tmp_path / "x.pth"))

    def test_a_file_that_was_cut_short(self, tmp_path: Path) -> None:
        path = torchscript(models.Net(), tmp_path / "x.pt")
        path.write_bytes(path.read_bytes()[:-500])
        with pytest.raises(InvalidArgument, match=r"x\.pt is truncated or damaged"):
            load_source(str(path))

    def test_a_file_does_not_accept_a_checkpoint(self, tmp_path: Path) -> None:
        path = torchscript(models.Net(), tmp_path / "x.pt")
        with pytest.raises(InvalidArgument, match="contains its weights"):
            load_source(str(path), path)
