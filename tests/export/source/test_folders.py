"""Saved programs, torch.hub folders, transformers folders and LightningModules as the source."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument, NotFound
from ingot.export import export_model, load_source
from ingot.export.source.subject import describe
from ingot.runtime import EngineSpec, load_engine
from tests.export import models
from tests.support import RunIngot


def save_program(path: Path) -> Path:
    example = (torch.randn(3, 4),)
    shapes = ({0: torch.export.Dim("rows")},)
    torch.export.save(torch.export.export(models.Net().eval(), example, dynamic_shapes=shapes), path)
    return path


class TestPrograms:
    @pytest.mark.matrix
    def test_a_trusted_folder_describes_its_own_inputs(self, tmp_path: Path) -> None:
        path = save_program(tmp_path / "net.pt2")
        module = load_source(str(path), allow_code=True)
        assert isinstance(module, nn.Module)
        archive = export_model(module, name="net")
        assert str(archive.signature.inputs[0]) == "x:float32[batch,4]"
        assert archive.signature.batch == "batch"

    def test_without_trust_it_is_not_even_opened(self, tmp_path: Path) -> None:
        (tmp_path / "net.pt2").write_bytes(b"anything")
        with pytest.raises(InvalidArgument, match=r"net\.pt2 can run code .* --allow-code"):
            load_source(str(tmp_path / "net.pt2"))

    def test_what_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "net.pt2").write_bytes(b"anything")
        with pytest.raises(InvalidArgument, match=r"net\.pt2 does not contain an exported program"):
            load_source(str(tmp_path / "net.pt2"), allow_code=True)


HUBCONF = """
import torch

dependencies = ["torch"]


def doubling():
    '''Doubles.'''

    class Doubling(torch.nn.Module):
        def forward(self, x):
            return x * 2

    return Doubling()


def number():
    return 3
"""


class TestHub:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "hubconf.py").write_text(HUBCONF)
        return tmp_path

    @pytest.mark.matrix
    def test_an_entry_point(self, folder: Path, run_ingot: RunIngot) -> None:
        out = folder / "a.ingot"
        result = run_ingot("export", f"{folder}:doubling", "--input", "x:float32[batch,2]", "--out", out)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith(f"{out}: doubling, fp32")

    def test_a_missing_entry_point(self, folder: Path) -> None:
        with pytest.raises(NotFound, match=r"no entry point 'tripling'; it has: doubling, number"):
            load_source(f"{folder}:tripling")

    def test_a_callable_that_returns_no_module(self, folder: Path) -> None:
        with pytest.raises(InvalidArgument, match="returned a int, not a module"):
            load_source(f"{folder}:number")

    def test_a_folder_without_any(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"no hubconf\.py"):
            load_source(f"{tmp_path}:doubling")
        with pytest.raises(NotFound, match=r"does not contain a transformers model \(config\.json\)"):
            load_source(str(tmp_path))


class Lit(nn.Module):
    """As a LightningModule is: hyperparameters in its checkpoint, and an example of its input."""

    def __init__(self, width: int, scale: float = 1.0):
        super().__init__()
        self.layer = nn.Linear(width, 2)
        self.scale = scale
        self.example_input_array = torch.randn(3, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


def lightning_checkpoint(path: Path, **hyperparameters: Any) -> nn.Module:
    module = Lit(**hyperparameters)
    content = {
        "pytorch-lightning_version": "2.5.0",
        "state_dict": module.state_dict(),
        "hyper_parameters": hyperparameters,
    }
    torch.save(content, path)
    return module


class TestLightning:
    @pytest.mark.matrix
    def test_its_checkpoint_has_its_hyperparameters_and_its_example_input(self, tmp_path: Path) -> None:
        original = lightning_checkpoint(tmp_path / "last.ckpt", width=5, scale=3.0)
        module = load_source("tests.export.source.test_folders:Lit", tmp_path / "last.ckpt")
        assert isinstance(module, nn.Module)
        archive = export_model(module)
        assert str(archive.signature.inputs[0]) == "x:float32[batch,5]"
        x = np.ones((2, 5), np.float32)
        engine = load_engine(EngineSpec(archive.variant().path(), device="cpu"))
        assert np.allclose(engine.run({"x": x})["output"], original(torch.tensor(x)).detach().numpy(), atol=1e-6)
        engine.close()

    def test_hyperparameters_that_the_class_does_not_take(self, tmp_path: Path) -> None:
        lightning_checkpoint(tmp_path / "last.ckpt", width=5)
        loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
        loaded["hyper_parameters"] = {"depth": 3}
        torch.save(loaded, tmp_path / "last.ckpt")
        with pytest.raises(InvalidArgument, match=r"Lit\(.*\) does not accept depth of the checkpoint.s hyper_par"):
            load_source("tests.export.source.test_folders:Lit", tmp_path / "last.ckpt")


class TestTransformers:
    """Needs the package ``transformers``, which Ingot itself does not."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=50,
            max_position_embeddings=32,
        )
        transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
        return tmp_path

    @pytest.mark.matrix
    def test_a_saved_model_has_its_inputs(self, folder: Path) -> None:
        module = load_source(str(folder))
        assert isinstance(module, nn.Module)
        archive = export_model(module, name="bert")
        assert [str(spec) for spec in archive.signature.inputs] == [
            "input_ids:int64[batch,seq]=0..49",
            "attention_mask:int64[batch,seq]",
        ]
        assert archive.signature.range("seq").high == 32
        assert archive.signature.batch == "batch"
        ids = np.concatenate([golden.inputs["input_ids"].ravel() for golden in archive.variant().goldens()])
        assert ids.max() > 1  # proved on the whole vocabulary, not on its first two words

    @pytest.mark.matrix
    def test_a_pair_of_texts_is_answered_as_by_the_model_where_a_tokenizer_makes_types(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
        module = load_source(str(folder))
        assert isinstance(module, nn.Module)
        archive = export_model(module, name="bert")
        assert [spec.name for spec in archive.signature.inputs] == ["input_ids", "attention_mask", "token_type_ids"]
        inputs = {
            "input_ids": np.array([[1, 5, 2, 7, 2]]),
            "attention_mask": np.ones((1, 5), np.int64),
            "token_type_ids": np.array([[0, 0, 0, 1, 1]]),
        }
        with torch.no_grad():
            expected = module(**{name: torch.tensor(array) for name, array in inputs.items()})["logits"].numpy()
        with contextlib.closing(load_engine(EngineSpec(archive.variant().path(), device="cpu"))) as engine:
            assert np.allclose(engine.run(inputs)["logits"], expected, atol=1e-5)
        assert not any("is left out" in note for note in archive.variant().serving.provenance.notes)

    def test_inputs_that_are_left_out_are_noted(self, folder: Path) -> None:
        names = ["input_ids", "attention_mask", "token_type_ids", "bbox"]
        for content, notes in (
            (
                {},
                ["'token_type_ids' is left out: no tokenizer in the folder declares it; for pairs of texts"],
            ),
            (
                {"model_input_names": names},
                ["'bbox' is left out: the folder's tokenizer or processor produces it; the model"],
            ),
            ({"model_input_names": names[:2]}, []),
        ):
            (folder / "tokenizer_config.json").write_text(json.dumps(content))
            module = load_source(str(folder))
            assert isinstance(module, nn.Module)
            told = [note for note in describe(module, None, (), None).notes if "is left out" in note]
            assert len(told) == len(notes)
            assert all(note.startswith(start) for note, start in zip(told, notes, strict=True))

    def test_an_architecture_that_there_is_not(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
        with pytest.raises(InvalidArgument, match="architecture NoSuchModel, which transformers does not have"):
            load_source(str(folder))

    @pytest.mark.matrix
    def test_code_of_the_folders_own_is_run_by_consent_only(
        self, tmp_path: Path, run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("transformers")
        monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))  # it copies the code before running it
        folder = own_code(tmp_path / "model")
        call: list[str | Path] = ["export", folder, "--input", "x:float32[batch,3]", "--out", tmp_path / "a.ingot"]
        refused = run_ingot(*call)
        assert refused.returncode == 1
        assert "own Python code (auto_map in its config.json), which loading it can run" in refused.stderr
        assert refused.stderr.rstrip().endswith("or allow_code=True)")
        assert not (tmp_path / "a.ingot").exists()
        trusted = run_ingot(*call, "--allow-code")
        assert trusted.returncode == 0, trusted.stderr
        assert (tmp_path / "a.ingot").exists()

    def test_a_folder_with_code_is_refused_before_anything_is_imported(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling.Own"}}))
        with pytest.raises(InvalidArgument, match=r"own Python code \(auto_map.*--allow-code"):
            load_source(str(tmp_path))

    @pytest.mark.parametrize("content", ["[]", "{"])
    def test_a_malformed_configuration(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidArgument, match=r"config\.json (is not a configuration|cannot be read)"):
            load_source(str(tmp_path))


OWN = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):
    model_type = "ingot_own"


class Own(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(3, 2)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""


def own_code(folder: Path) -> Path:
    """Write a model of transformers that only the code in its folder can load."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN)
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.Own"}
    config = {"architectures": ["Own"], "auto_map": own, "model_type": "ingot_own"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
