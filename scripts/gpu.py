"""Test and measure Ingot on a machine with one NVIDIA GPU, and write the results into the documentation.

The machine may have no access to the internet, and may be yours for minutes only::

    python scripts/gpu.py pack gpu.tar --python 3.12      here: this tree, with the packages that the machine lacks
    tar xf gpu.tar && python scripts/gpu.py install       there
    python scripts/gpu.py run results.json                there: each step, with a limit of time
    python scripts/gpu.py write results.json              here: the tables of docs/guides/serve/gpu.md and benchmarks.md

``run`` writes the results after each step, so those of finished steps are kept when the machine goes. Steps that failed
or were not reached run again with ``run results.json --again`` on the same machine, or on one like it. ``--device cpu``
shows that the script works, and no more. ``make gpu`` is ``run --write`` on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "serve" / "gpu.md"
BENCHMARKS = ROOT / "docs" / "concepts" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "gpu" / "results.json"
WHEELS = "wheels"
_FOR_TESTS = ("pytest", "hypothesis", "httpx", "onnx", "tritonclient[grpc,http]")
# Pytest's exit code where whole modules are skipped.
_NO_TESTS = 5
# Seconds in which no step can do anything.
_LEAST = 5
# The last characters of a step's output, which the results have.
_SHOWN = 4000
_PACKAGES = ("torch", "onnxruntime-gpu", "onnxruntime", "nvidia-cudnn-cu13", "numpy", "ingot-serve")
_TESTS = "pytest -q -rs -p no:cacheprovider -o faulthandler_timeout={limit} tests/gpu/test_{name}.py"
_BENCHMARK = "benchmarks.gpu --device {device} --build {build} --models "


@dataclass(frozen=True)
class Step:
    """A command in its own process, and how many seconds it may take; ``small`` are its further options on a CPU."""

    name: str
    module: str
    limit: int
    small: str = ""


def _tests(name: str, limit: int) -> Step:
    return Step(name, _TESTS.replace("{name}", name).replace("{limit}", str(limit)), limit)


# In the order of their worth, as the time may be short.
STEPS = (
    _tests("confined", 60),
    _tests("torch_cuda", 150),
    _tests("ort_cuda", 120),
    _tests("serving_cuda", 150),
    Step("resnet50", _BENCHMARK + "resnet50 --seconds 0.4 --windows 3", 180, "--small --max-batch 2 --processes 1"),
    Step("bert", _BENCHMARK + "bert --seconds 0.4 --windows 3", 120, "--small --max-batch 2 --processes 1"),
    _tests("tensorrt", 180),
    _tests("divided", 180),
)
# Areas: verified by reading the sources of the libraries, by tests with substitutes, and by the tests of a step.
AREAS = (
    ("Engine processes: CUDA within their confinement", "yes", "the writes that CUDA makes", "confined"),
    (
        "PyTorch in lanes, with and without CUDA graphs; too little memory",
        "yes",
        "streams in virtual time",
        "torch_cuda",
    ),
    ("ONNX Runtime in lanes, its options, indices out of range", "yes", "sessions that check options", "ort_cuda"),
    (
        "Serving: CUDA memory of clients, turns, placement, isolated engines",
        "the driver's calls",
        "a fake driver",
        "serving_cuda",
    ),
    ("TensorRT", "no", "options", "tensorrt"),
    ("Divided models, by NCCL", "no", "on the CPU, by gloo", "divided"),
    ("Speed: ResNet-50", "no", "no", "resnet50"),
    ("Speed: BERT-base", "no", "no", "bert"),
)


def main() -> None:
    """Do what the first argument names."""
    parser = argparse.ArgumentParser(prog="python scripts/gpu.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write a tar file with this tree and the packages for another machine")
    packing.add_argument("out", type=Path)
    packing.add_argument("--python", default=platform.python_version(), help="version of Python there")
    packing.add_argument("--glibc", type=int, default=28, help="version 2.N of the C library there")
    packing.add_argument("--extras", default="gpu", help="of Ingot; with 'gpu,export' PyTorch is packed, some 3 GB")
    packing.add_argument("--without-packages", action="store_true", help="if the machine has them, or the internet")
    commands.add_parser("install", help="install the packages of the tar file into this Python, without the internet")
    running = commands.add_parser("run", help="run the steps, and write results after each")
    running.add_argument("out", type=Path)
    running.add_argument("--device", default="cuda:0", help="cpu shows that the script works")
    running.add_argument("--steps", default=",".join(step.name for step in STEPS), help="comma-separated")
    running.add_argument("--again", action="store_true", help="keep the steps that passed on such a machine")
    running.add_argument("--write", action="store_true", help="write the results into the documentation, too")
    running.add_argument("--minutes", type=float, default=15, help="start no step that may take longer")
    writing = commands.add_parser("write", help="write results into the documentation")
    writing.add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.out, options)
    elif options.command == "install":
        install()
    elif options.command == "run":
        failed = run(options)
        if options.write:
            write(options.out)
        sys.exit(failed)
    else:
        write(options.results)


def pack(out: Path, options: argparse.Namespace) -> None:
    """Write the files that git tracks, and packages, into a tar file."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tarfile.open(out, "w") as archive:
        for name in filter(None, files.split("\0")):
            archive.add(ROOT / name, name)
        if options.without_packages:
            return
        wheels = out.with_suffix(".wheels")
        shutil.rmtree(wheels, ignore_errors=True)  # or what another call downloaded would be packed, too
        target = ["--python-version", options.python, "--only-binary", ":all:", "--platform", "manylinux2014_x86_64"]
        # Pip does not know that a system with a newer C library runs packages for an older one.
        for minor in range(5, options.glibc + 1):
            target += ["--platform", f"manylinux_2_{minor}_x86_64"]
        # Ingot itself runs from the tree.
        wanted = [*_requirements(options.extras), *_FOR_TESTS]
        command = ["-m", "pip", "download", "-q", "--dest", str(wheels), *target, "-c", str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, *command, *wanted], check=True)
        for wheel in sorted(wheels.iterdir()):
            archive.add(wheel, f"{WHEELS}/{wheel.name}")


def _requirements(extras: str) -> list[str]:
    """Return the dependencies of Ingot, with those of some extras."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(item for name in filter(None, extras.split(",")) for item in project["optional-dependencies"][name]),
    ]


def install() -> None:
    """Install the packages of the tar file; those that are installed already stay."""
    wheels = ROOT / WHEELS
    if not wheels.is_dir():
        raise SystemExit(f"there is no folder {wheels}: pack without --without-packages, or use pip install '.[gpu]'")
    names = {re.split(r"-\d", wheel.name)[0] for wheel in wheels.iterdir()}
    present = {re.sub(r"[-.]", "_", item.metadata["Name"]).lower() for item in metadata.distributions()}
    missing = [str(wheel) for wheel in wheels.iterdir() if re.split(r"-\d", wheel.name)[0].lower() not in present]
    print(f"{len(names) - len(missing)} packages are installed already, {len(missing)} are installed now", flush=True)
    command = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", *missing]
    if missing:
        subprocess.run([sys.executable, *command], check=True)


def run(options: argparse.Namespace) -> int:
    """Run the steps, and return 1 if one failed, otherwise 0."""
    known = {step.name: step for step in STEPS}
    if unknown := [name for name in options.steps.split(",") if name not in known]:
        raise SystemExit(f"unknown step '{unknown[0]}'; there are {', '.join(known)}")
    before = json.loads(options.out.read_text()) if options.again and options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": describe(options.device), "steps": dict(before.get("steps", {}))}
    if before and {**before["machine"], "date": ""} != {**found["machine"], "date": ""}:
        print(f"all steps run, since {options.out} is of another machine, or of other packages", flush=True)
        found["steps"] = {}
    end = time.monotonic() + 60 * options.minutes
    for step in (known[name] for name in options.steps.split(",")):
        if found["steps"].get(step.name, {}).get("outcome") == "passed":
            continue
        left = end - time.monotonic() - _LEAST
        print(f"{step.name}: at most {min(step.limit, left):.0f} s", flush=True)
        found["steps"][step.name] = done = outcome(step, options, min(step.limit, left))
        print(f"{step.name}: {done['outcome']} ({done['seconds']:.0f} s) {done['summary']}", flush=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    outcomes = [found["steps"][name]["outcome"] for name in options.steps.split(",")]
    return int(any(each not in ("passed", "skipped") for each in outcomes))


def outcome(step: Step, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run a step, and return how it ended, with the end of what it printed."""
    cpu = options.device == "cpu"
    build = options.out.absolute().with_suffix("") / "models"
    module = step.module.format(device=options.device, build=build) + (f" {step.small}" if cpu else "")
    began = time.monotonic()
    if limit <= 0:
        return {"outcome": "not reached", "seconds": 0.0, "summary": "no time was left", "command": "", "output": ""}
    command = [sys.executable, "-m", *shlex.split(module)]
    # Its servers and engine processes end with it.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            ended = "out of time"
        else:
            ended = _ended(process.returncode, output)
    lines = [line for line in output.splitlines() if line.strip()]
    return {
        "outcome": ended,
        "seconds": round(time.monotonic() - began, 1),
        "summary": lines[-1].strip("= ") if lines else "",
        "command": f"python -m {module}",
        "output": output[-_SHOWN:],
    }


def _ended(code: int, output: str) -> str:
    skipped = re.search(r"^=*\s*\d+ skipped", output.splitlines()[-1] if output else "")
    if skipped and code in (0, _NO_TESTS):
        return "skipped"
    return "failed" if code else "passed"


def describe(device: str) -> dict[str, str]:
    """Return the device, its driver and the versions of packages."""
    found = {"device": device, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device != "cpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(f"nvidia-smi does not run ({error}): is this a machine with an NVIDIA GPU?") from error
        found["gpu"], found["driver"] = (part.strip() for part in text.splitlines()[0].split(","))
    return found


def write(results: Path) -> None:
    """Write the tables of two pages, and keep the results.

    Raises:
        SystemExit: the results are not of a GPU.
    """
    sys.path.insert(0, str(ROOT))
    from benchmarks.serving.docs import updated

    found = json.loads(results.read_text())
    if found["machine"]["device"] == "cpu":
        raise SystemExit(f"{results} has results of a CPU, which show that the script works, and no more")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(updated(PAGE.read_text(), table(found), "tested"))
    figures = [line for name in ("resnet50", "bert") for line in _figures(found["steps"].get(name, {}))]
    if figures:
        lines = [*dict.fromkeys(figures), "", _about(found["machine"])]
        BENCHMARKS.write_text(updated(BENCHMARKS.read_text(), lines, "gpu"))


def _figures(step: Mapping[str, Any]) -> list[str]:
    """Return the lines of a benchmark's table and of what it was measured on."""
    lines: Sequence[str] = step.get("output", "").splitlines() if step.get("outcome") == "passed" else ()
    begin = next((place for place, line in enumerate(lines) if line.startswith("| model")), len(lines))
    return [line for line in lines[begin:] if line.startswith("|")]


def table(found: Mapping[str, Any] | None) -> list[str]:
    """Return the lines of the table of what is verified, and how; None if nothing has run on a GPU."""
    steps = {} if found is None else found["steps"]
    rows = [(area, reading, substitutes, _ran(steps.get(name))) for area, reading, substitutes, name in AREAS]
    head = ("what", "by reading the libraries' sources", "by substitutes", "by running on a GPU")
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * 4, *rows)]
    if found is None:
        return lines
    return [*lines, "", _about(found["machine"])]


def _about(machine: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {machine[name]}" for name in _PACKAGES if name in machine)
    return f"{machine['gpu']}, driver {machine['driver']}; {versions}; {machine['date']}"


def _ran(step: Mapping[str, Any] | None) -> str:
    return "no" if step is None else f"{step['outcome']}: {step['summary']}".replace("|", "\\|")


if __name__ == "__main__":
    main()
