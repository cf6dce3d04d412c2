"""Load a server for long, check every answer, and measure whether its memory grows.

``python -m benchmarks.reliability.soak --seconds 1800`` divides the time among four ways to run the server, with a
short control that leaks. In each, HTTP with JSON, HTTP with binary tensors and gRPC are used at once, with requests
that the client gives up and bad requests between the others. The exit status is 0 only if no answer was wrong, none was
lost, memory grew by at most 1% in ten minutes, and the control was caught.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.generator import Shape, compiled, finish, grpc_samples, http_samples, start
from benchmarks.reliability.memory import Watch
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import Process, free_ports
from benchmarks.serving.wires import OpenBinary, OpenJson
from ingot.protocol import open_inference_pb2 as pb
from ingot.tensors import Array

BUILD = Path("build/serving")
LEGS: dict[str, tuple[str, ...]] = {
    "one process": ("--isolate", "none"),
    "an engine process": ("--isolate", "all"),
}
CONTROL = "control that leaks"
CANCELLED = 0.002
JUDGED = 120.0  # seconds of a leg from which the growth of memory counts: before, pools still fill
ENDS = ("right", "wrong", "refused", "denied", "rejected", "cut", "silent", "abandoned")


def leg(name: str, served: Model, build: Path, seconds: float, module: str = "ingot") -> dict[str, Any]:
    """Run one server under the mixed load; return the counts of all clients and the growth of its memory."""
    program = compiled(build)
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", module, "serve", f"{served.name}:1", "--store", str(served.store)]
    command += ["--device", "cpu", "--http-port", str(port), "--grpc-port", str(grpc_port), *LEGS.get(name, ())]
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        server = Process(command, {}, folder / "log")
        try:
            server.wait(port, OpenJson().request(served, 0).http())
            bad = OpenJson().request(served, 0).http()
            http_samples(folder / "json", served, OpenJson(), port, [_of_another_shape(bad), _not_json(bad)])
            http_samples(folder / "binary", served, OpenBinary(), port, [_of_another_shape(bad)])
            grpc_samples(folder / "grpc", served, grpc_port, [_absent(served)])
            loads = [
                start(program, port, "http", folder / "json", seconds, Shape(4, 8, cancel=CANCELLED, seed=1)),
                start(program, port, "http", folder / "binary", seconds, Shape(4, 8, cancel=CANCELLED, seed=2)),
                start(program, grpc_port, "grpc", folder / "grpc", seconds, Shape(2, 16, cancel=CANCELLED, seed=3)),
            ]
            watch = Watch(server, min(5.0, seconds / 100))
            found = [finish(load) for load in loads]
            memory = watch.stop()
        finally:
            server.close()
        faults = (folder / "log").read_text(errors="replace").count("Traceback")
    return {
        "leg": name,
        "seconds": seconds,
        **{end: sum(each[end] for each in found) for end in ENDS},
        "example": next((each["example"] for each in found if each["example"]), ""),
        "p99_ms": dict(zip(("json", "binary", "grpc"), (each["p99_ms"] for each in found), strict=True)),
        "tracebacks": faults,
        "memory_percent": memory.percent,
        "memory_error": memory.error,
        "memory_mib": memory.megabytes,
        "leaks": memory.leaks(),
    }


def faults(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the promises that a run broke."""
    wrong = []
    for result in found:
        name = result["leg"]
        if name == CONTROL:
            if not result["leaks"]:
                wrong.append(f"{name}: the leak was not found")
            continue
        wrong += [f"{name}: {result[end]} {end}" for end in ("wrong", "denied", "cut", "silent") if result[end]]
        if not result["right"]:
            wrong.append(f"{name}: no answers")
        if result["leaks"] and result["seconds"] >= JUDGED:
            wrong.append(f"{name}: memory grows by {result['memory_percent']:.2f}% in ten minutes")
        if result["tracebacks"]:
            wrong.append(f"{name}: {result['tracebacks']} exceptions in the log")
    return wrong


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [
        "| server | s | right answers | wrong | lost | refused | rejected | abandoned | MiB | growth in 10 minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        lost = each["cut"] + each["silent"]
        cells = [each["leg"], f"{each['seconds']:g}", f"{each['right']:,}", each["wrong"], lost, each["refused"]]
        cells += [f"{each['rejected']:,}", f"{each['abandoned']:,}", f"{each['memory_mib']:.0f}"]
        cells += [f"{each['memory_percent']:+.2f}% ± {each['memory_error']:.2f}"]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main() -> None:
    """Run all legs and the control; print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of all legs together, without the control")
    parser.add_argument("--legs", default=",".join(LEGS), help="comma-separated: " + ", ".join(LEGS))
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    options = parser.parse_args()
    names = options.legs.split(",")
    if unknown := [name for name in names if name not in LEGS]:
        raise SystemExit(f"unknown legs: {', '.join(unknown)}; known are {', '.join(LEGS)}")
    build = options.build.absolute()
    served = model(options.model, build)
    found = []
    for name in names:
        found.append(leg(name, served, build, options.seconds / len(names)))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    control = min(60.0, options.seconds / len(names))
    found.append(leg(CONTROL, served, build, control, "benchmarks.reliability.leaking"))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    print(f"{sum(each['right'] for each in found[:-1]):,} right answers")
    if options.seconds / len(names) < JUDGED:
        print(f"memory was not judged: that needs {JUDGED:g} s for each of {len(names)} legs")
    if wrong := faults(found):
        raise SystemExit("\n".join(wrong))


def _of_another_shape(request: bytes) -> bytes:
    """Return the request with a dimension of another size, of as many characters."""
    changed = request.replace(b'"shape":[1,', b'"shape":[2,', 1)
    if changed == request:
        raise ValueError("the request has no shape to change")
    return changed


def _not_json(request: bytes) -> bytes:
    return request[:-1] + b"}" if request[-1:] != b"}" else request[:-1] + b"]"


def _absent(served: Model) -> bytes:
    x: Array = next(iter(served.samples[0].values()))
    message = pb.ModelInferRequest(model_name="absent")
    message.inputs.add(name="x", datatype="FP32", shape=[1, *x.shape])
    message.raw_input_contents.append(x.tobytes())
    return message.SerializeToString()


if __name__ == "__main__":
    main()
