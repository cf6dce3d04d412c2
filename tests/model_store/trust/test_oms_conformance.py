"""The conformance suite of OpenSSF Model Signing, through an adapter.

The suite is not part of this repository. ``OMS_CONFORMANCE`` names a checkout of it
(https://github.com/sampras343/model-signing-conformance, or ``conformance`` of ossf/model-signing-spec), and
``OMS_SPECIFICATION`` one of https://github.com/ossf/model-signing-spec, whose schemas the suite checks bundles with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support import ROOT

# Methods that Ingot refuses: their tests of valid signatures fail, and those of invalid ones prove nothing.
_REFUSED = ("certificate", "sigstore")


@pytest.mark.long
def test_the_conformance_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every test that signs or verifies with a key must pass."""
    suite, specification = (os.environ.get(name) for name in ("OMS_CONFORMANCE", "OMS_SPECIFICATION"))
    if not suite or not specification:
        pytest.skip("OMS_CONFORMANCE and OMS_SPECIFICATION do not name checkouts of the suite and the specification")
    pytest.importorskip("jsonschema")
    (tmp_path / "oms_schemas").symlink_to(Path(specification, "schemas").resolve())
    adapter = tmp_path / "adapter"
    adapter.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.model_store.trust.oms_adapter "$@"\n')
    adapter.chmod(0o755)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "test", "-c", "pyproject.toml", "--rootdir=.", "-p", "no:cacheprovider"]
    command += [f"--entrypoint={adapter}", f"--junitxml={report}", f"--basetemp={tmp_path / 'models'}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=suite, env=environment, capture_output=True, check=False, timeout=1800)
    passed, failed, refused = results(report)
    with capsys.disabled():
        print(f"\nOMS conformance: {len(passed)} passed, {len(failed)} failed, {len(refused)} not applicable")
    assert not failed
    assert len(passed) >= 40


def results(report: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the tests that passed, failed, and are of methods that Ingot refuses."""
    passed: list[str] = []
    failed: list[str] = []
    refused: list[str] = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        title = name.partition("[")[2].partition("|")[0]
        if any(method in title.replace("key-verify-as-", "") for method in _REFUSED):
            refused.append(name)
        elif case.find("failure") is not None or case.find("error") is not None or case.find("skipped") is not None:
            failed.append(name)
        else:
            passed.append(name)
    return passed, failed, refused
