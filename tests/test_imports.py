"""Imports go down only, floor by floor, and serving an ONNX archive never imports torch."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import structure
from tests.support import ROOT

FLOORS = {
    "cli": 10,
    "bench": 7,
    "deploy": 9,
    "importing": 7,
    "quant": 7,
    "export": 6,
    "server": 8,
    "config": 6,
    "faults": 1,
    "serving": 7,
    "runtime": 5,
    "model_store": 4,
    "protocol": 4,
    "client": 5,
    "bounds": 3,
    "steps": 3,
    "demo": 3,
    "addresses": 0,
    "tasks": 0,
    "foreign": 1,
    "permissions": 1,
    "report": 1,
    "tensors": 2,
    "_build": 0,
    "_version": 0,
    "errors": 0,
}
# The facade and the entry point stand above all floors.
TOP = ("ingot", "ingot.__main__")
MODULES = structure.modules()


def imports(module: str) -> Iterator[str]:
    return structure.imports(MODULES[module], MODULES)


def folder(module: str) -> str:
    return module.split(".")[1]


INSIDE = [module for module in MODULES if module not in TOP]


def test_every_folder_has_a_floor() -> None:
    assert {folder(module) for module in INSIDE} == set(FLOORS)


def test_imports_go_down() -> None:
    wrong = [
        f"{module} imports {name}"
        for module in INSIDE
        for name in imports(module)
        if name.split(".")[0] == "ingot"
        if name in TOP or (folder(name) != folder(module) and FLOORS[folder(name)] >= FLOORS[folder(module)])
    ]
    assert wrong == []


@pytest.mark.matrix
def test_only_the_command_line_and_deployments_import_the_server() -> None:
    assert {folder(module) for module in INSIDE for name in imports(module) if name.startswith("ingot.server")} == {
        "cli",
        "deploy",
        "server",
    }


@pytest.mark.matrix
def test_no_folder_has_a_circle() -> None:
    """Neither between modules nor between folders, counted as one room each."""
    assert {item.name: item.circle for item in structure.folders() if item.circle} == {}


def test_a_circle_between_folders_is_found(tmp_path: Path) -> None:
    for name, text in {"a/x": "import ingot.b.x", "a/y": "", "b/x": "", "b/y": "from ingot.a import y"}.items():
        path = tmp_path / "ingot" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (tmp_path / "ingot" / "__init__.py").touch()
    [outermost, *_] = structure.folders(tmp_path)
    assert (outermost.name, outermost.arrows, set(outermost.circle)) == ("ingot", 2, {"a", "b"})


@pytest.mark.matrix
def test_broad_excepts_are_few_and_have_reasons() -> None:
    assert [place for place, reason in structure.broad_excepts().items() if not reason] == []
    assert structure.broad_per_1000() <= structure.MOST_BROAD


def test_broad_excepts_are_found(tmp_path: Path) -> None:
    (tmp_path / "ingot").mkdir()
    (tmp_path / "ingot" / "__init__.py").write_text(
        "import contextlib\n"
        "with contextlib.suppress(Exception):  # noqa: BLE001\n    pass\n"
        "try:\n    pass\n"
        "except OSError:\n    pass\n"
        "except (ValueError, BaseException):  # noqa: BLE001 - any\n    pass\n"
        "except Exception:  # another\n    pass\n"
        "except:\n    pass\n"
    )
    found = {place.rpartition(":")[2]: reason for place, reason in structure.broad_excepts(tmp_path).items()}
    assert found == {"2": "", "8": "any", "10": "another", "12": ""}
    assert structure.broad_per_1000(tmp_path) == pytest.approx(4000 / 13)


@pytest.mark.matrix
def test_few_functions_have_many_parameters() -> None:
    assert len(structure.with_many_parameters()) <= structure.MOST_WITH_MANY


def test_imports_below_the_face_of_a_package_are_found(tmp_path: Path) -> None:
    texts = {
        "ingot/__init__": "",
        "ingot/errors": "",
        "ingot/a/__init__": '"""A package. Start in x.py."""',
        "ingot/a/x": "",
        "ingot/a/y": "",
        "tests/test_face": "from ingot import errors\nfrom ingot.a import x\nfrom ingot.a.x import name\n",
        "tests/test_below": "from ingot.a import y\nfrom ingot.a.y import name\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    assert structure.imports_below_faces(tmp_path) == {"tests/test_below.py": 2}


def test_functions_with_many_parameters_are_found(tmp_path: Path) -> None:
    (tmp_path / "ingot").mkdir()
    (tmp_path / "ingot" / "__init__.py").write_text(
        "def many(a, /, b, c, d, e, *, f, g, h, i): ...\n"
        "class Few:\n    def few(self, a, b, c, d, e, f, g, h, *others, **more): ...\n"
    )
    assert structure.with_many_parameters(tmp_path) == ["ingot/__init__.py:1 many"]


# Imported when a model of their formats is loaded, and by nothing that an ONNX model needs.
_DIVIDED = ("collectives", "sharded", "stages", "tensor_parallel")
_HANDLERS = (
    *("base_handler", "image_classifier", "image_segmenter", "sagemaker"),
    *("text_classifier", "text_handler", "transforms", "vision_handler"),
)
_WHOLE = ("aoti", "torch_arrays", "torch_engine", "torch_lane", "torch_program")
TORCH_ENGINES = {f"ingot.runtime.engines.pytorch.{name}" for name in _WHOLE}
TORCH_ENGINES |= {f"ingot.runtime.engines.sharding.{name}" for name in _DIVIDED}
# What handlers of TorchServe extend, in engine processes only.
TORCH_ENGINES |= {f"ingot.runtime.engines.python.torchserve.ts.{name}" for name in _HANDLERS}
TORCH_ENGINES.add("ingot.runtime.engines.isolation.group")  # torchrun, in engine processes only
TORCH_ENGINES.add("ingot.runtime.profiling.operators")  # the profiler, in a command only


@pytest.mark.matrix
def test_the_runtime_and_the_store_know_neither_torch_nor_the_web() -> None:
    wrong = []
    for module in INSIDE:
        if folder(module) not in ("runtime", "model_store"):
            continue
        roots = {name.split(".")[0] for name in imports(module)}
        allowed = {"torch"} if module in TORCH_ENGINES else set()
        if module.startswith("ingot.model_store.registry."):  # a client, imported only where a registry is meant
            allowed.add("httpx")
        found = roots & {"torch", "fastapi", "starlette", "uvicorn", "grpc", "httpx"} - allowed
        wrong += [f"{module} imports {name}" for name in sorted(found)]
    assert wrong == []


def imported(log: str) -> set[str]:
    """Return the modules in a log of ``python -X importtime``."""
    return set(re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", log, re.MULTILINE))


HEAVY = {
    "torch",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "fastapi",
    "httptools",
    "grpc",
    "numpy",
    "cryptography",
}


@pytest.mark.one_case
@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import ingot"],
        ["-m", "ingot", "--help"],
        ["-m", "ingot", "serve", "--help"],
        ["-m", "ingot", "--version"],
    ],
    ids=["import", "help", "serve-help", "version"],
)
def test_the_light_ways_in_import_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    names = imported(result.stderr)
    assert "ingot" in names
    assert names & HEAVY == set()


@pytest.mark.matrix
@pytest.mark.parametrize("client", ["Client", "AsyncClient"])
def test_a_client_imports_few_modules(client: str) -> None:
    code = f"import sys, ingot; ingot.{client}; print(*(name for name in sys.modules if name.startswith('ingot.')))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    names = result.stdout.split()
    assert {"runtime", "model_store", "server"} & {folder(name) for name in names} == set()
    assert len(names) <= 35


# Writes what the variable is when ONNX Runtime is first imported; looking for the package alone does not count.
HOOK = """
import os, sys
def hook(event, arguments):
    if event == "import" and arguments[0] == "onnxruntime":
        print("telemetry disabled:", os.environ.get("ORT_DISABLE_TELEMETRY"), file=sys.stderr, flush=True)
sys.addaudithook(hook)
"""


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let commands report how they import ONNX Runtime, and return what they must print."""
    folder = tmp_path / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    return "telemetry disabled: 1"


@pytest.mark.matrix
def test_exporting_disables_telemetry_before_onnx_runtime_is_imported(watched: str) -> None:
    code = "import ingot, torch; ingot.export_model(torch.nn.Linear(2, 1), (torch.ones(1, 2),))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert watched == re.findall("telemetry .*", result.stderr)[0]


def test_serving_an_onnx_archive_imports_no_torch(digits_archive: Path, tmp_path: Path, watched: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ingot", "serve", str(digits_archive)]
    command += ["--http-port", "0", "--grpc-port", "0"]
    log = tmp_path / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT) as process,
    ):
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        ready = any(line.startswith("HTTP") for line in lines)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert ready
    assert process.returncode == 0
    assert watched == re.findall("telemetry .*", log.read_text())[0]
    names = imported(log.read_text())
    assert {"onnxruntime", "httptools"} <= names
    # FastAPI is imported in a thread, once the server is ready.
    unused = {"torch", "onnx", "onnx_ir", "onnxscript", "ingot.export", "ingot.quant", "sympy", "cryptography"}
    assert names & unused == set()
