"""Is ``ingot bench`` right, and fast enough? ``python -m benchmarks.serving.loader`` prints three tables.

They compare its figures with the rates of servers whose rate is known (``limits/answer.c``), the load that it sends
from one core with what Ingot's server answers on one, and its rate with that of ``wrk`` on the same server, in turn.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.serving.models import Model, model
from benchmarks.serving.pairs import build_folder
from benchmarks.serving.processes import LOAD_CORE, SERVER_CORE, free_ports, pinned, served, started
from ingot.bench.measurement import Bench, Rule
from ingot.bench.payload import Payload
from ingot.bench.target import Target

_RATES = (500, 5_000, 20_000)
_CLIENTS = 32
# Clients per rate: a server whose queue is empty falls behind its rate, so 40 ms of requests wait there, which is as
# long as a busy machine may keep the client waiting.
_SLACK = 25
_LUA = "wrk.method = 'POST'\nwrk.body = io.open('{body}', 'rb'):read('*a')\nwrk.headers['{name}'] = '{value}'\n"


class _Bare(Target):
    """A server without statistics."""

    def statistics(self) -> None:
        return None


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.loader")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=2, help="of each load")
    options = parser.parse_args()
    if missing := [tool for tool in ("gcc", "wrk", "taskset") if shutil.which(tool) is None]:
        raise SystemExit(f"install {', '.join(missing)}")
    tiny = model("tiny", build_folder())
    os.sched_setaffinity(0, {LOAD_CORE})
    rule = Rule(windows=options.seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "answer"
        source = Path(__file__).with_name("limits") / "answer.c"
        subprocess.run(["gcc", "-O2", "-o", program, source], check=True)
        payload = _payload(tiny)
        _known(program, payload, rule, options.rounds)
        with _ingot(tiny) as (url, grpc):
            _against_wrk(url, payload, rule, options.rounds, folder)
            absorbed = {at: _bench(at, payload, rule).closed(_CLIENTS).total for at in (url, grpc)}
        for at, total in absorbed.items():
            print(f"{at.partition(':')[0]}: {total.rate:,.0f}/s answered on one core, client {total.cpu:.2f} of a core")
        with _answering(program, 0) as at:
            most = _bench(at, payload, rule, bare=True).closed(_CLIENTS).total
        print(f"http, a server that answers at once: {most.rate:,.0f}/s, client {most.cpu:.2f} of a core")
        print("load per core of the client over what the server answers on one:")
        print(f"    http {most.rate / most.cpu / absorbed[url].rate:.1f} (sent), ", end="")
        print(", ".join(f"{at.partition(':')[0]} {1 / total.cpu:.1f}" for at, total in absorbed.items()))


def _payload(tiny: Model) -> Payload:
    requests = tuple({name: array[None] for name, array in sample.items()} for sample in tiny.samples)
    return Payload(requests=requests, samples=1, text="")


def _bench(url: str, payload: Payload, rule: Rule, *, bare: bool = False) -> Bench:
    target = (_Bare if bare else Target)(url, "tiny")
    return Bench(target, target.plan(payload, arrivals="fixed"), 1, rule)


def _known(program: Path, payload: Payload, rule: Rule, rounds: int) -> None:
    print("rate of the server: closed loop over it; rate of an open loop: measured over it")
    for rate in _RATES:
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            with _answering(program, rate) as url:
                found[0].append(_bench(url, payload, rule, bare=True).closed(max(16, rate // _SLACK)).total.rate / rate)
            with _answering(program, 0) as url:
                bench = _bench(url, payload, rule, bare=True)
                found[1].append(bench.opened(rate).total.rate / rate)
        print(f"{rate:>8,}/s: " + "; ".join(f"{min(part):.4f} to {max(part):.4f}" for part in found), flush=True)


def _against_wrk(url: str, payload: Payload, rule: Rule, rounds: int, folder: Path) -> None:
    target = Target(url, "tiny")
    bench = Bench(target, target.plan(payload), 1, rule)
    head, _, body = target.plan(payload).requests[0].partition(b"\r\n\r\n")
    header = re.search(rb"(Inference-Header-Content-Length): (\d+)", head, re.IGNORECASE)
    if header is None:
        raise SystemExit("the request has no length of its header")
    (folder / "body").write_bytes(body)
    script = folder / "wrk.lua"
    script.write_text(_LUA.format(body=folder / "body", name=header[1].decode(), value=header[2].decode()))
    print(f"{_CLIENTS} clients, rate and p50 of ingot bench over those of wrk, by round:", end=" ")
    ratios = []
    for number in range(rounds):
        measured = {}
        for tool in ("bench", "wrk") if number % 2 else ("wrk", "bench"):
            if tool == "bench":
                point = bench.closed(_CLIENTS)
                measured[tool] = point.total.rate, point.quantile(0.5)
            else:
                measured[tool] = _wrk(f"{url}/v2/models/tiny/infer", script, rule.windows or 1)
        ratios.append([one / other for one, other in zip(measured["bench"], measured["wrk"], strict=True)])
        print("{:.3f} {:.3f}".format(*ratios[-1]), end=", ", flush=True)
    print("medians " + " ".join(f"{median(part):.3f}" for part in zip(*ratios, strict=True)))


def _wrk(url: str, script: Path, seconds: int) -> tuple[float, float]:
    command = ["wrk", "-t1", f"-c{_CLIENTS}", "--latency", "-s", str(script)]
    subprocess.run(pinned([*command, "-d1", url], LOAD_CORE), check=True, capture_output=True)
    text = subprocess.run(
        pinned([*command, f"-d{seconds}", url], LOAD_CORE), check=True, capture_output=True, text=True
    ).stdout
    rate, p50 = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"50%\s+([\d.]+)(us|ms)", text)
    if rate is None or p50 is None or "Non-2xx" in text:
        raise SystemExit(text)
    return float(rate[1]), float(p50[1]) * {"us": 1e-6, "ms": 1e-3}[p50[2]]


@contextmanager
def _answering(program: Path, rate: float) -> Iterator[str]:
    (port,) = free_ports(1)
    with started([str(program), str(port), str(rate)], [SERVER_CORE]):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _ingot(tiny: Model) -> Iterator[tuple[str, str]]:
    with served([f"{tiny.name}:1", "--store", str(tiny.store)], [SERVER_CORE]) as (addresses, _):
        yield addresses["http"], addresses["grpc"]


if __name__ == "__main__":
    main()
