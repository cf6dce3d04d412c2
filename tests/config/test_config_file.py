"""``ingot.toml``: its settings and models in a running server, its schema, its lines and its changes."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, strategies

import ingot
from ingot.config import ServerConfig
from ingot.config.changes import changes
from ingot.config.configuration import Configuration
from ingot.config.file import ConfigFile, schema
from ingot.config.model import ModelConfig
from ingot.config.toml_lines import lines
from ingot.errors import AlreadyExists, InvalidArgument, InvalidConfig, NotFound
from tests import onnx_models
from tests.server.outside import serving

SETTINGS = ServerConfig.settings()
OWN = [name for name, setting in SETTINGS.items() if setting.per_model]


def other(name: str) -> Any:
    """Return a value of a setting that is not its default, as the file has it."""
    setting = SETTINGS[name]
    if name in (
        texts := {
            "cors_origin": "https://example.com",
            "cache": "64MB",
            "canary": "5,50",
            "device": "cuda:0,1",
            "engine": "openvino",
            "memory_budget": "4GB",
            "permit": "network",
            "sticky_header": "x-user",
            "torchserve_ports": "0,0,0,0,0",
        }
    ):
        return texts[name]
    if setting.pattern:
        return "h=h_next"
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    if setting.kind is bool:
        return not setting.default
    if setting.duration:
        return "20ms"
    if setting.kind is int:
        return (setting.default or 0) + 256 if setting.most is None else 2
    return 0.5 if setting.kind is float else "x.txt"


def configuration(folder: Path, text: str, name: str = "ingot.toml", **settings: Any) -> Configuration:
    path = folder / name
    path.write_text(text)
    return Configuration.of(settings, path)


@pytest.mark.matrix
def test_a_server_has_the_settings_of_its_file_and_each_model_its_own(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    onnx_models.affine(tmp_path / "models")
    extra = onnx_models.affine(tmp_path, "extra")
    file = tmp_path / "models" / "ingot.toml"
    file.write_text(
        "[server]\nmax_queue = 77\nmax_batch = 16\n"
        '[[model]]\nsource = "./affine.onnx"\n'
        '[[model]]\nname = "Small"\nsource = "affine.onnx"\nmax_batch = 4\ninstances = 2\nmax_queue = 7\nslo = "10s"\n'
    )
    options = ("--config", str(file), "--max-batch", "32", "--device", "cpu")
    with serving("fast", tmp_path, *options, sources=[str(extra)]) as service:
        with httpx.Client(base_url=f"http://{service.http}/v2/models", trust_env=False, timeout=30) as http:
            found = {name: http.get(f"/{name}/config").json() for name in ("affine", "Small", "extra")}
        service.check()
    assert {name: each["max_batch_size"] for name, each in found.items()} == {"affine": 32, "Small": 4, "extra": 32}
    counts = {name: each["instance_group"][0]["count"] for name, each in found.items()}
    assert counts == {"affine": 1, "Small": 2, "extra": 1}


def test_a_program_reads_the_file_of_its_argument_or_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx_models.affine(tmp_path)
    file = tmp_path / "ingot.toml"
    file.write_text('[server]\nhttp_port = 0\ngrpc_port = 0\n[[model]]\nname = "one"\nsource = "affine.onnx"\n')
    with ingot.serve(config=file) as server:
        assert server.models == ["one"]
    monkeypatch.setenv("INGOT_CONFIG", str(file))
    with ingot.serve(tmp_path / "affine.onnx") as server:
        assert server.models == ["affine", "one"]


def test_a_model_that_cannot_be_added_is_named_with_its_line(tmp_path: Path) -> None:
    onnx_models.affine(tmp_path)
    file = tmp_path / "ingot.toml"
    for source, error, text in (
        ("nowhere.onnx", NotFound, f"{file}:1: there is no file {tmp_path / 'nowhere.onnx'}"),
        ("./affine.onnx", AlreadyExists, f"{file}:1: two models are called 'affine' version 1"),
    ):
        file.write_text(f'[[model]]\nsource = "{source}"\n')
        with pytest.raises(error) as caught:
            ingot.serve(tmp_path / "affine.onnx", config=file, http_port=0, grpc_port=0)
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("name", OWN)
def test_every_setting_per_model_changes_how_it_runs(tmp_path: Path, name: str) -> None:
    """A setting that the runtime did not read would be one that does nothing."""
    text = f'[[model]]\nsource = "digits:1"\n{name} = {json.dumps(other(name))}\n[[model]]\nsource = "digits:2"\n'
    found = configuration(tmp_path, text)
    own, others = (model.runtime(found.server) for model in found.models)
    assert others == found.server.runtime
    assert own != others
    assert dataclasses.asdict(found.models[0].config(found.server)).keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_file_the_variable_and_the_option_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("INGOT_INSECURE", "1")
    text = f"[server]\n{name} = {json.dumps(other(name))}\n"
    file = configuration(tmp_path, text)
    if name != "insecure":
        assert file.given[name].origin == f"{tmp_path / 'ingot.toml'}:2"
        value = getattr(file.server, name)
        assert value == (tmp_path / "x.txt" if SETTINGS[name].kind is Path else SETTINGS[name].read(other(name)))
    setting = SETTINGS[name]
    if setting.file_only:
        return
    default = setting.shown(setting.default) if setting.default else str(other(name))
    monkeypatch.setenv(SETTINGS[name].variable, default)
    assert configuration(tmp_path, text).given[name].origin == SETTINGS[name].variable
    assert configuration(tmp_path, text, **{name: default}).given[name].origin == name


VALUES: tuple[object, ...] = ("20ms", "5 fortnights", "", 3, 0, -1, 0.5, True, [], {}, "cpu", 10**12)


@pytest.mark.matrix
@pytest.mark.parametrize("name", SETTINGS)
def test_the_schema_accepts_what_the_server_accepts(name: str) -> None:
    import jsonschema  # takes a second of each worker that only collects

    validator = jsonschema.Draft202012Validator(schema())
    other_value = other(name)
    for value in (*VALUES, other_value):
        for table in ({"server": {name: value}}, {"model": [{"source": "digits:1", name: value}]}):
            accepted = True
            try:
                ConfigFile.of(table, Path("ingot.toml"))
            except InvalidConfig:
                accepted = False
            assert validator.is_valid(table) == accepted, f"{table}: the reader says {accepted}"
            assert accepted or value is not other_value or ("model" in table and name not in OWN)


KEYS = strategies.text("abcäöü\"'. \n", min_size=1, max_size=3)
SCALARS = strategies.one_of(strategies.integers(), strategies.booleans(), strategies.text('ab"\\\n[]=#', max_size=6))
TABLES = strategies.dictionaries(KEYS, strategies.one_of(SCALARS, strategies.lists(SCALARS, max_size=2)), max_size=3)


@pytest.mark.matrix
@given(strategies.lists(strategies.tuples(strategies.sampled_from(["[a]", "[[b]]", "[b.c]"]), TABLES), max_size=5))
def test_every_key_has_its_line(tables: list[tuple[str, dict[str, Any]]]) -> None:
    text, at, count = "", {}, 0
    for header, table in tables:
        if header in text if header == "[a]" else header == "[b.c]" and not text.rstrip().endswith("[[b]]"):
            continue  # it would be invalid
        count += header == "[[b]]"
        path: tuple[str | int, ...] = {"[a]": ("a",), "[[b]]": ("b", count - 1), "[b.c]": ("b", count - 1, "c")}[header]
        text += f"# a comment\n\n{header}\n"
        at[path] = text.count("\n")
        for key, value in table.items():
            at[(*path, key)] = text.count("\n") + 1
            written = json.dumps(value) if not isinstance(value, list) else f"[\n{json.dumps(value)[1:-1]}\n]"
            text += f"{json.dumps(key, ensure_ascii=False)} = {written} # comment\n"
    tomllib.loads(text)
    found = lines(text)
    assert {path: found[path] for path in at} == at


def test_a_file_that_every_user_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ingot.toml").write_text("")
    os.chmod(tmp_path / "ingot.toml", 0o646)  # noqa: PTH101
    with pytest.raises(InvalidArgument, match=r"chmod o-w"):
        Configuration.of({}, tmp_path / "ingot.toml")


@pytest.mark.one_case
@pytest.mark.parametrize("name", SETTINGS)
def test_a_change_of_a_setting_is_live_or_needs_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("INGOT_INSECURE", "1")
    model = '[[model]]\nsource = "digits:1"\n[[model]]\nsource = "digits:2"\nmax_batch = 5\n'
    old = configuration(tmp_path, model)
    new = configuration(tmp_path, f"[server]\n{name} = {json.dumps(other(name))}\n{model}")
    found = changes(old, new)
    if name == "insecure":
        assert not found
        return
    assert [change.name for change in (*found.live, *found.restart)] == [name]
    assert bool(found.live) == SETTINGS[name].per_model
    again = [after.source for _, after, _ in found.reload]
    assert again == ([] if name not in OWN else ["digits:1"] if name == "max_batch" else ["digits:1", "digits:2"])


def test_models_that_are_new_gone_and_changed(tmp_path: Path) -> None:
    def model(source: str, name: str = "", more: str = "") -> str:
        return f'[[model]]\nsource = "{source}"\n' + (f'name = "{name}"\n' if name else "") + more

    old = configuration(tmp_path, model("a:1") + model("b:1", "b") + model("c:1", "c") + model("d:1", "d"))
    new = configuration(tmp_path, model("b:2", "b") + model("c:1", "c", "instances = 2\n") + model("e:1"), "new.toml")
    found = changes(old, new)
    assert found.lines == [
        "live: load e:1",
        "live: unload a:1",
        "live: unload d=d:1",
        "live: load b=b:2 again: source: b:1 -> b:2",
        "live: load c=c:1 again: instances: 1 -> 2",
    ]
    assert not changes(old, old)
    versions = configuration(tmp_path, model("b:1", "b") + model("b:2", "b"), "two.toml")
    assert changes(versions, versions).lines == []
    assert {found.address for found in versions.models} == {"b=b:1", "b=b:2"}
    assert isinstance(versions.models[0], ModelConfig)
