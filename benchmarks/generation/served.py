"""The archive of the model behind a server, asked by clients that read streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

import ingot
from benchmarks.generation.load import Asked, Rate, asked
from ingot.runtime.machine import memory

_MODEL = "gpt2"
_CONTEXT = 256
# Requests whose first token is timed, and seconds before those next to streams, until these have their first tokens.
_PROBES, _SETTLED = 9, 3.0


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        rate: of tokens.
        first: seconds to the first token of each request.
        between: seconds between tokens.
        stages: mean seconds of each stage of a step.
        alone: seconds to the first token of a request while the server does nothing else.
        next_to: the same of equally long prompts, while it answers as many streams as there are clients.
    """

    rate: Rate
    first: list[float]
    between: list[float]
    stages: dict[str, float]
    alone: float
    next_to: float


def run(archive: Path | str, work: Sequence[Asked], clients: int, threads: int) -> Run:
    """Start a server, and measure it with some clients."""
    with ingot.serve(archive, http_port=0, grpc_port=0, slots=clients + 1, context=_CONTEXT, threads=threads) as server:
        return asyncio.run(_measured(server.http_url, work, clients))


async def _measured(url: str, work: Sequence[Asked], clients: int) -> Run:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=limits) as client:
        alone = await _probed(client, 1)
        before = await _stages(client)
        left = iter(work)
        began, spent = time.perf_counter(), _cpu()
        times: list[list[float]] = []

        async def ask() -> None:
            for each in left:
                times.append(await _times(client, each))

        await asyncio.gather(*(ask() for _ in range(clients)))
        seconds, cpu = time.perf_counter() - began, _cpu() - spent
        after = await _stages(client)
        next_to = await _next_to(client, clients)
    stages = {
        name: (total - before[name][0]) / max(count - before[name][1], 1) for name, (total, count) in after.items()
    }
    between = [later - earlier for each in times for earlier, later in itertools.pairwise(each)]
    tokens = sum(map(len, times))
    return Run(Rate(tokens / seconds, tokens / cpu), [each[0] for each in times], between, stages, alone, next_to)


async def _probed(client: httpx.AsyncClient, shift: int) -> float:
    """Return the median seconds to the first token of requests, one after the other.

    ``shift`` changes their tokens and not their lengths: the server does not read the beginning of a prompt again.
    """
    probes = [Asked([token - shift for token in each.prompt], 2) for each in asked(_PROBES, seed=1)]
    return statistics.median([(await _times(client, each))[0] for each in probes])


async def _next_to(client: httpx.AsyncClient, streams: int) -> float:
    """Return the median seconds to the first token of a request while streams are answered."""
    prompts = [each.prompt[:8] for each in asked(streams, seed=2)]
    long = [asyncio.create_task(_times(client, Asked(prompt, _CONTEXT - 8))) for prompt in prompts]
    await asyncio.sleep(_SETTLED)
    found = await _probed(client, 2)
    if any(task.done() for task in long):
        raise SystemExit("the streams ended before the requests next to them")
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    return found


def _cpu() -> float:
    """Return the seconds of CPU time of the server in this process, and of its engine processes.

    This thread is left out: its clients take more CPU time than the server, and the other ways have none.
    """
    ticks = 0
    for process in memory.engine_processes():
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # utime and stime
    return time.process_time() - time.thread_time() + ticks / os.sysconf("SC_CLK_TCK")


async def _times(client: httpx.AsyncClient, each: Asked) -> list[float]:
    """Return the seconds from a request to each of its tokens."""
    body = {"model": _MODEL, "prompt": each.prompt, "max_tokens": each.tokens, "temperature": 0, "stream": True}
    began, found = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                found.append(time.perf_counter() - began)
    if len(found) != each.tokens:
        raise SystemExit(f"{len(found)} of {each.tokens} tokens came: {answer.status_code}")
    return found


async def _stages(client: httpx.AsyncClient) -> dict[str, tuple[float, float]]:
    """Return the seconds and the count of each stage so far."""
    text = (await client.get("/metrics")).text
    found = dict.fromkeys(("read", "extend", "choose"), (0.0, 0.0))
    for name in found:
        label = f'stage="{name}"'
        line = r"^ingot_decoding_seconds_{}\{{.*{}.*\}} (\S+)$"
        values = [re.search(line.format(kind, label), text, re.MULTILINE) for kind in ("sum", "count")]
        if values[0] and values[1]:
            found[name] = float(values[0][1]), float(values[1][1])
    return found


def described(way: str, runs: Sequence[Run]) -> str:
    """Return the times of runs, in milliseconds."""
    first = [each for run in runs for each in run.first]
    between = [each for run in runs for each in run.between]
    stages = {name: statistics.median(run.stages[name] for run in runs) for name in runs[0].stages}
    lines = {
        "first token, alone": statistics.median(run.alone for run in runs),
        "first token, next to running streams": statistics.median(run.next_to for run in runs),
        "first token, p50": statistics.median(first),
        "between tokens, p50": statistics.median(between),
        "between tokens, p99": statistics.quantiles(between, n=100)[98],
        **{f"stage {name}, mean": seconds for name, seconds in stages.items()},
    }
    table = "".join(f"| {name} | {1000 * seconds:.1f} |\n" for name, seconds in lines.items())
    return f"\n| {way} | ms |\n|---|---|\n{table}"
