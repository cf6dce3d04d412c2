"""Imports go down only, floor by floor, and serving an ONNX archive never imports torch."""

from __future__ import annotations

import ast
import graphlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

FLOORS = {
    "cli": 6,
    "demo": 6,
    "export": 5,
    "importing": 5,
    "quant": 5,
    "server": 5,
    "runtime": 4,
    "model_store": 3,
    "bench": 3,
    "tensors": 2,
    "arrays": 2,
    "layout": 2,
    "faultlog": 2,
    "padding": 2,
    "pages": 2,
    "errors": 1,
}
# Siblings on one floor that may use each other, and how much of each other.
BESIDE = {
    ("quant", "ingot.export.program"),
    # Captured programs are quantized as graphs, captured anew and compiled.
    ("quant", "ingot.export.capture.exported"),
    ("quant", "ingot.export.lower.aoti"),
    ("quant", "ingot.export.lower.packed"),
    ("quant", "ingot.export.torch_arrays"),
    # A module is exported on the way.
    ("quant", "ingot.export"),
    # What readers found goes the way of every export.
    ("importing", "ingot.export"),
    ("importing", "ingot.export.source"),
    ("arrays", "ingot.tensors"),
    ("padding", "ingot.tensors"),
    ("cli", "ingot.demo.digits"),
}
# The facade and the entry point stand above all floors.
TOP = ("ingot", "ingot.__main__")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "ingot").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """Yield what a module imports anywhere in it, lazily or for types alone too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def folder(module: str) -> str:
    return module.split(".")[1]


INSIDE = [module for module in MODULES if module not in TOP]


def test_every_folder_has_a_floor() -> None:
    assert {folder(module) for module in INSIDE} == set(FLOORS)


@pytest.mark.parametrize("module", INSIDE)
def test_imports_go_down(module: str) -> None:
    own = folder(module)
    for name in imports(module):
        if name.split(".")[0] != "ingot" or name in TOP or folder(name) == own or (own, name) in BESIDE:
            continue
        assert FLOORS[folder(name)] < FLOORS[own], f"{module} imports {name}, which is not below it"


def test_imports_form_no_circle() -> None:
    graph = {module: set(imports(module)) & set(INSIDE) - {module} for module in INSIDE}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(INSIDE)


# Imported when a model of their formats is loaded, and by nothing that an ONNX model needs.
TORCH_ENGINES = {f"ingot.runtime.engines.{name}" for name in ("aoti", "torch_engine", "torch_program")}


@pytest.mark.parametrize("module", [module for module in INSIDE if folder(module) in ("runtime", "model_store")])
def test_the_runtime_and_the_store_know_neither_torch_nor_the_web(module: str) -> None:
    roots = {name.split(".")[0] for name in imports(module)}
    allowed = {"torch"} if module in TORCH_ENGINES else set()
    if module.startswith("ingot.model_store.registry."):  # a client, imported only where a registry is meant
        allowed.add("httpx")
    assert not roots & {"torch", "fastapi", "starlette", "uvicorn", "grpc", "httpx"} - allowed


def imported(log: str) -> set[str]:
    """Return the modules in a log of ``python -X importtime``."""
    return set(re.findall(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", log, re.MULTILINE))


HEAVY = {"torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "fastapi", "uvicorn", "grpc", "numpy", "cryptography"}


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


def test_serving_an_onnx_archive_imports_no_torch(digits_archive: Path, tmp_path: Path) -> None:
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
    names = imported(log.read_text())
    assert {"onnxruntime", "uvicorn"} <= names
    # FastAPI comes with the first request that needs it, which inference and health checks do not.
    unused = {"torch", "onnx", "onnx_ir", "onnxscript", "ingot.export", "ingot.quant", "sympy", "cryptography"}
    assert names & {*unused, "fastapi", "starlette"} == set()
