"""Measure the CPU time of a request without sockets: ``python -m benchmarks.serving.in_process VERSION...``.

A process loads the model ``tiny``, and passes the bytes of 32 clients, which each wait for their answers, to the
server's connections as the event loop would (``connections.py``). The kernel and the event loop's part of sockets are
left out. Of many short measurements the least counts, so that other work of the machine changes less than in a
measurement of a whole server. Repeat a run before a difference of under a fifth counts on a busy machine.

A version is a commit, a folder (``.`` is this tree), or a compiled wheel, which counts twice, compiled and as source.
They run in turn; the least of the rounds is shown, and divided by that of the first version. ``refused`` are requests
that cannot be answered in the time that they allow.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from benchmarks.serving.instructions import Counted, versions_of
from benchmarks.serving.models import Model, model
from benchmarks.serving.pairs import build_folder
from benchmarks.serving.wires import OpenBinary, OpenGrpc, OpenJson, Request, Wire, framed

MODEL = "tiny"
WORKER = Path(__file__).with_name("connections.py")
WIRES: dict[str, Wire] = {"binary": OpenBinary(), "json": OpenJson(), "grpc": OpenGrpc()}
FORMS = (*WIRES, "refused")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.in_process")
    parser.add_argument("versions", nargs="+", help="commits, wheels or folders; the first is compared with")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    build = build_folder()
    served = model(MODEL, build)
    versions = [version for name in parsed.versions for version in versions_of(name, build)]
    for version in versions:
        version.check()
    print(f"| CPU us a request | {' | '.join(version.name for version in versions)} |")
    print(f"|---|{'---|' * len(versions)}", flush=True)
    for form in parsed.forms.split(","):
        found: dict[int, list[float]] = defaultdict(list)
        for _ in range(parsed.rounds):
            for place, version in enumerate(versions):
                found[place].append(measure(version, served, form, parsed.clients))
        least = [min(each) for each in found.values()]
        cells = [f"{least[0]:.2f}", *(f"{each:.2f} ({each / least[0]:.2f})" for each in least[1:])]
        print(f"| {form} | {' | '.join(cells)} |", flush=True)


def measure(version: Counted, served: Model, form: str, clients: int) -> float:
    """Return the least microseconds of CPU time of one request."""
    numbers = [number % len(served.samples) for number in range(clients)]
    first = [_message(served, number, "binary" if form == "refused" else form) for number in numbers]
    messages = first, [_message(served, number, form) for number in numbers]
    line = [sys.executable, str(WORKER), str(served.store), f"{MODEL}:1", form]
    done = subprocess.run(
        line, input=pickle.dumps(messages), stdout=subprocess.PIPE, env={**os.environ, **version.variables}, check=False
    )
    if done.returncode:
        raise SystemExit(f"version {version.name} failed with {form}")
    return float(done.stdout)


def _message(served: Model, number: int, form: str) -> bytes:
    """Return a client's message: a whole HTTP request, or a gRPC message with its prefix."""
    if form == "grpc":
        return framed(WIRES[form].request(served, number).body)
    if form == "refused":
        return _hurried(WIRES["binary"].request(served, number)).http()
    return WIRES[form].request(served, number).http()


def _hurried(request: Request) -> Request:
    """Return a request of the binary form that allows a microsecond."""
    field = "Inference-Header-Content-Length"
    size = int(request.headers[field])
    head = json.loads(request.body[:size])
    head["parameters"] = {**head.get("parameters", {}), "timeout": 1}
    written = json.dumps(head, separators=(",", ":")).encode()
    headers = {**request.headers, field: str(len(written))}
    return replace(request, headers=headers, body=written + request.body[size:])


if __name__ == "__main__":
    main()
