"""Images are built from the tested releases, by hash; the SBOM is valid; an audit that cannot check is not a pass."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ingot
from scripts import audit, install
from tests.support import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONSTRAINTS = ROOT / "constraints.txt"


@pytest.mark.parametrize("path", audit.FILES, ids=lambda path: path.stem)
def test_each_release_has_hashes_and_is_the_tested_one(path: Path) -> None:
    assert audit.faults(path, CONSTRAINTS) == []
    assert len(audit.pins(path)) > 3


def test_the_images_hold_what_the_project_requires() -> None:
    for name, engine in (("cpu", "onnxruntime"), ("gpu", "onnxruntime-gpu")):
        held = audit.pins(ROOT / "requirements" / f"{name}.txt")
        assert {engine, "pyjwt", "fastapi", "grpcio", "numpy", "uvloop"} <= set(held)
        assert "torch" not in held


def test_the_images_install_by_hash_alone() -> None:
    installs = re.findall(r"pip install ([^&]*?)(?=&&|\n(?!    ))", DOCKERFILE)
    assert len(installs) == 7
    assert all("--require-hashes" in line or "--no-deps --no-index" in line for line in installs), installs
    assert "--no-build-isolation" in DOCKERFILE  # otherwise pip fetches the build backend without hashes


def test_the_images_follow_the_usual_rules() -> None:
    """Rules of hadolint that matter for security: DL3002, DL3007, DL3009, DL3015, DL3020, DL3042."""
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+:\S+)", DOCKERFILE, re.MULTILINE))
    bases = [defaults[name] for name in re.findall(r"^FROM \$\{(\w+)\} AS", DOCKERFILE, re.MULTILINE)]
    assert len(bases) == len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE)) == 5
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    assert re.findall(r"^USER (\S+)", DOCKERFILE, re.MULTILINE) == ["10001", "10001"]
    assert not re.search(r"^ADD ", DOCKERFILE, re.MULTILINE)
    for run in re.findall(r"^RUN (?:.*\\\n)*.*", DOCKERFILE, re.MULTILINE):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run
            assert "rm -rf /var/lib/apt/lists/*" in run
        if "pip " in run and "pip check" not in run:
            assert "--no-cache-dir" in run


def test_the_labels_name_the_release() -> None:
    labels = re.findall(r'image.version="(.+?)"', DOCKERFILE)
    assert labels == [ingot.__version__] * 2


def test_missing_hashes_and_other_releases_are_reported(tmp_path: Path) -> None:
    wrong = tmp_path / "cpu.txt"
    wrong.write_text("numpy==0.1 \\\n    --hash=sha256:00\nfastapi==0.165.0\n")
    found = audit.faults(wrong, CONSTRAINTS)
    assert len(found) == 2
    assert found[0].startswith("cpu.txt: numpy==0.1, but constraints.txt has ")
    assert found[1] == "cpu.txt: fastapi has no hashes"


def answer(stdout: str, stderr: str = "") -> Any:
    return lambda command, **options: subprocess.CompletedProcess(command, 0, stdout, stderr)


def report(**fields: Any) -> str:
    names = {name: version for path in audit.FILES for name, (version, _) in audit.pins(path).items()}
    return json.dumps({"dependencies": [{"name": name, "version": at, **fields} for name, at in names.items()]})


# pip-audit exits with 0 if the service knows none of the packages.
@pytest.mark.parametrize(
    ("stdout", "status", "says"),
    [
        (report(vulns=[]), 0, "0 known vulnerabilities"),
        (report(vulns=[{"id": "CVE-1", "fix_versions": ["9"]}]), 1, "numpy==2.4.6: CVE-1, fixed in 9"),
        (report(skip_reason="not found"), 2, "not checked: cpu.txt: numpy: not found"),
        (json.dumps({"dependencies": []}), 2, "not checked: cpu.txt: numpy: not in the report"),
        ("", 2, "not checked: cpu.txt: numpy: Name or service not known"),
    ],
    ids=["clean", "vulnerable", "unknown", "empty", "offline"],
)
def test_only_an_audit_of_everything_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdout: str, status: int, says: str
) -> None:
    monkeypatch.setattr(subprocess, "run", answer(stdout, "Traceback\nName or service not known\n"))
    assert audit.main() == status
    text = capsys.readouterr().out
    assert re.sub(r"numpy==[\d.]+", "numpy==2.4.6", says) in re.sub(r"numpy==[\d.]+", "numpy==2.4.6", text)
    assert ("This is not a pass" in text) == (status == 2)


@pytest.mark.matrix
def test_the_sboms_are_valid_and_complete(tmp_path: Path) -> None:
    """Run the recipe of `make sbom`, which has no prerequisite but the environment that runs this test."""
    from cyclonedx.schema import SchemaVersion  # takes 6 s of each worker that only collects
    from cyclonedx.validation.json import JsonStrictValidator

    recipe = re.search(r"^sbom:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    (tmp_path / "Makefile").write_text(f"BIN := {Path(sys.executable).parent}\nsbom:\n{recipe[1]}")
    for name in ("pyproject.toml", "README.md", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run(["make", "sbom"], check=True, cwd=tmp_path, capture_output=True)
    for image in ("cpu", "gpu"):
        text = (tmp_path / "build" / "sbom" / f"{image}.cdx.json").read_text()
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        content = json.loads(text)
        assert content["metadata"]["component"]["name"] == "ingot-serve"
        held = {item["name"]: item["version"] for item in content["components"]}
        pinned = audit.pins(ROOT / "requirements" / f"{image}.txt")
        assert held == {name: version for name, (version, _) in pinned.items()}
        assert all(item["externalReferences"][0]["hashes"] for item in content["components"])


@pytest.mark.long
@pytest.mark.parametrize("image", ["build", "cpu"])
def test_pip_accepts_the_files_in_hash_mode(tmp_path: Path, image: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--target", str(tmp_path)]
    path = ROOT / "requirements" / f"{image}.txt"
    run = subprocess.run([*command, "--require-hashes", "-r", str(path)], capture_output=True, text=True, check=False)
    if "Failed to establish a new connection" in run.stderr or "Temporary failure" in run.stderr:
        pytest.skip("no package index can be reached")
    assert run.returncode == 0, run.stderr[-2000:]


def test_the_demo_installs_what_it_needs_and_the_tests_the_rest(tmp_path: Path) -> None:
    def commands(target: str) -> str:
        return subprocess.run(
            ["make", "-n", "--no-print-directory", target, f"VENV={tmp_path}"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    def extras_of(target: str) -> list[str]:
        return re.findall(r"scripts/install\.py (\S+)", commands(target))

    assert re.search(r"70 packages, 1\.4 GB, .* 2 to 3 minutes", commands("demo"))
    assert extras_of("demo") == ["cpu,export,demo"]
    (tmp_path / ".demo").touch()
    assert extras_of("demo") == []
    (everything,) = extras_of("lint")
    assert {"cpu", "export", "demo", "dev"} <= set(everything.split(","))
    (tmp_path / ".installed").touch()
    (tmp_path / ".demo").unlink()
    assert extras_of("demo") == extras_of("lint") == []


def test_of_pips_output_large_downloads_are_shown() -> None:
    lines = {
        "  Downloading https://host/whl/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl (190.4 MB)": "torch (190 MB)",
        "Downloading nvidia_cublas_cu12-12.8-py3-none-any.whl (1.2 GB)": "nvidia_cublas_cu12 (1 GB)",
        "Downloading typer-0.15-py3-none-any.whl (900 kB)": None,
        "Installing collected packages: a, b, c": "  installing 3 packages",
        "Requirement already satisfied: numpy": None,
    }
    for line, expected in lines.items():
        text = install.shown(line)
        assert text is None if expected is None else expected in str(text)


def test_an_installation_that_fails_is_tried_a_second_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The index may not answer for one package, which pip reports as a conflict."""
    count = tmp_path / "count"
    pip = tmp_path / "python"
    pip.write_text(
        f"#!/bin/sh\necho run >> {count}\necho 'ERROR: ResolutionImpossible'\n[ $(wc -l < {count}) -ge $RUNS ]\n"
    )
    pip.chmod(0o755)
    for runs, code in ((1, 0), (2, 0), (3, 1)):
        count.unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(pip))
            patch.setenv("RUNS", str(runs))
            assert install.main("cpu") == code
        assert len(count.read_text().split()) == min(runs, 2)
        output = capfd.readouterr()
        assert ("pip failed; it runs once more" in output.out) == (runs > 1)
        assert ("ResolutionImpossible" in output.err) == (code == 1)
