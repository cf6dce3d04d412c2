"""Compiled wheels: the rules for their modules, and one that is built, installed, and tested as the source is."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

from scripts import hot_modules
from tests.support import ROOT, RequireTool

# Run on the wheel, without the tests of private names.
BLACK_BOX = (
    "tests/server/http",
    "tests/server/grpc",
    "tests/server/faults",
    "tests/server/torchserve",
    "tests/server/test_request_path.py",
    "tests/server/test_remembered_requests.py",
    "tests/server/test_batching.py",
    "tests/server/test_draining.py",
    "tests/server/test_observation.py",
    "tests/server/test_sequences.py",
    "tests/server/test_pipelines.py",
)

# What each rule finds, and the same without the fault.
RULES = {
    "several bases": ("class A:\n x: int\nclass B(A, C): ...", "class B(A, Generic[T]): ..."),
    "replaces a method": (
        "class A:\n def f(self): ...\nclass B(A):\n def __init__(self):\n  self.g, (*self.f, h) = 1, (2, 3)",
        "class A:\n @property\n def f(self): ...\n def __init__(self): self.g = self.h",
    ),
    "a keyword of C": (
        "class A:\n def f(self): self._inline += 1",
        "class A:\n def __init__(self): self.inline = 1",
    ),
    "sets the first name only": ("class A:\n a = b = 0", "class A:\n a = 0\n b = 0"),
    "is not a constant": ("class A:\n f = staticmethod(g)", "class A(Enum):\n f = g()\nclass B:\n x = -1, b''"),
    "is left unset": ("class A:\n x: B | C | None = None", "class A:\n x: int = 0\n y: B | None = None"),
    "looked up as a global": ("@dataclass\nclass A:\n x: object = None", "@dataclass\nclass A:\n x: Any = None"),
    "dataclass with slots": (
        "@dataclass(slots=True)\nclass A: ...",
        "@dataclass(frozen=True)\nclass A:\n x: int = f()",
    ),
    "outside of its class": ("class A: ...\nA.b = 1", "def f(a): a.b = 1"),
    "async generator": ("async def f():\n yield 1", "async def f():\n def g(): yield 1"),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_finds_its_fault(rule: str) -> None:
    wrong, right = RULES[rule]
    [found] = hot_modules.faults({"ingot/a.py": wrong}, {})
    assert rule in found
    assert found.startswith("ingot/a.py:")
    assert hot_modules.faults({"ingot/a.py": right}, {}) == []


@pytest.mark.parametrize(
    ("imported", "name"),
    [
        ("from ingot.b import A", "A"),
        ("from ingot.b import A as C", "C"),
        ("from ingot import b", "b.A"),
        ("import ingot.b", "ingot.b.A"),
        ("import ingot.b as m", "m.A"),
    ],
)
def test_interpreted_modules_neither_extend_nor_change_compiled_classes(imported: str, name: str) -> None:
    hot = {"ingot/b.py": "class A: ...\nclass P(Protocol): ..."}
    other = f"{imported}\ndef f():\n class B({name}): ...\n{name}.x = 1\n{name}().x = 1\nclass Q(P): ..."
    extended, changed = hot_modules.faults(hot, {"ingot/c.py": other})
    assert extended.startswith(f"ingot/c.py:3: {name} is extended, but compiled")
    assert changed.startswith(f"ingot/c.py:4: {name}.x is set outside of its class")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, require_tool: RequireTool) -> Mapping[str, str]:
    """Variables with which Python finds the wheel instead of the source."""
    require_tool("gcc")
    faulthandler.cancel_dump_traceback_later()  # on a busy machine it takes longer than a test may
    folder = tmp_path_factory.mktemp("compiled")
    variables = {**os.environ, "INGOT_COMPILE": "1", "MYPYC_OPT_LEVEL": "0"}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if re.search("Failed to establish a new connection|Temporary failure", built.stdout + built.stderr):
        pytest.skip("no package index can be reached")
    assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    [wheel] = folder.glob("*.whl")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{version}-{version}-" in wheel.name
    site = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}


@pytest.mark.long
class TestWheel:
    """A wheel that the documented command builds, without optimization, installed into a folder."""

    def test_it_names_its_build(self, environment: Mapping[str, str]) -> None:
        for variable, build in (("", "compiled"), ("0", "compiled"), ("1", "pure")):
            command = [sys.executable, "-m", "ingot", "--version"]
            printed = subprocess.check_output(command, env={**environment, "INGOT_PURE": variable}, text=True)
            assert f"({build})" in printed
        listed = ", ".join(f"'{path.removesuffix('.py').replace('/', '.')}'" for path in hot_modules.modules())
        code = f"import importlib\nfor name in {listed}: print(importlib.import_module(name).__file__)"
        for variable, suffix in (("", ".so"), ("1", ".py")):
            command = [sys.executable, "-c", code]
            files = subprocess.check_output(command, env={**environment, "INGOT_PURE": variable}, text=True).split()
            assert all(file.endswith(suffix) for file in files), files

    def test_tracebacks_name_file_and_line(self, environment: Mapping[str, str]) -> None:
        code = "from ingot.tensors import DType, arrays\narrays.from_bytes('x', DType.FP32, [2], b'')"
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        found = re.search(r'File "(.*ingot/tensors/arrays\.py)", line (\d+), in from_bytes', run.stderr)
        assert found is not None, run.stderr
        line = (ROOT / "ingot/tensors/arrays.py").read_text().splitlines()[int(found[2]) - 1]
        assert "raise InvalidArgument" in line

    def test_it_passes_the_tests_of_the_source(self, environment: Mapping[str, str]) -> None:
        faulthandler.cancel_dump_traceback_later()  # each of these tests has its own limit
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=append", "-n", "2"]
        chosen = ["-m", "not source and not long and not matrix and not gpu", *BLACK_BOX]
        run = subprocess.run(
            [*command, *chosen], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout[-8000:]
