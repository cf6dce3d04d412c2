"""A replica from the latencies that an archive recorded, with constants for the time around the engine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ingot.bench.target import Protocol
from ingot.deploy.capacity.server import Server
from ingot.deploy.capacity.simulation import Overhead
from ingot.errors import InvalidArgument
from ingot.model_store import Variant
from ingot.runtime.loading.choice import devices_of
from ingot.runtime.loading.threads import TINY_CALL
from ingot.runtime.machine import devices
from ingot.runtime.profiling import profile
from ingot.tensors import Array, symbols

OVERHEADS: Mapping[Protocol, Overhead] = {
    "binary": Overhead(request=35e-6, call=80e-6),
    "json": Overhead(request=45e-6, call=90e-6),
    "grpc": Overhead(request=30e-6, call=120e-6),
}
"""What small requests cost the server by protocol, from ``benchmarks.serving`` with the model ``tiny``: the medians of
three runs on an x86 server at 1, 8 and 32 clients."""


def sample(variant: Variant) -> dict[str, Array]:
    """Return the inputs of one sample, of the sizes for which the archive's latencies were recorded."""
    variant.check_answers_at_once("a plan of replicas")
    goldens = variant.goldens()
    example = goldens[0].inputs if goldens else profile.zeros(variant.signature)
    return profile.repeat(variant.signature, example, 1) if variant.signature.batch is not None else dict(example)


def varies(variant: Variant) -> bool:
    """Return whether requests of one sample can have different sizes, and therefore different durations."""
    return bool(set(symbols(variant.signature.inputs)) - {variant.signature.batch})


def recorded(variant: Variant, *, device: str, cores: int | None, overhead: Overhead) -> tuple[Server, list[str]]:
    """Return a replica, and remarks about how far the record applies to it.

    Args:
        variant: of an archive.
        device: ``cpu`` or ``cuda``.
        cores: of the replica; None for those of the machine that the latencies were recorded on.
        overhead: time outside the engine.

    Raises:
        InvalidArgument: no latencies were recorded on this device.
    """
    evidence, name = variant.serving.evidence, variant.name
    seconds = {item.rows: item.seconds for item in evidence.latency if item.rows}
    if not seconds:
        raise InvalidArgument(f"variant '{name}' has no recorded latencies; --measure measures them on this machine")
    if device not in (made := devices_of(variant) or {"cpu"}):
        raise InvalidArgument(
            f"the latencies of variant '{name}' were recorded on {', '.join(sorted(made))}, not on {device}; "
            f"--measure measures them on a machine with such a device"
        )
    found = re.search(r"(\d+) cores?\b", evidence.machine)
    there = int(found[1]) if found else 1
    cores = cores or there
    short = seconds[min(seconds)] < TINY_CALL
    notes = []
    if evidence.machine != (here := devices.describe()):
        notes.append(
            f"the latencies were recorded on another machine ({evidence.machine or 'unknown'}; this one: {here}), and "
            "the plan is for machines like that one; --measure measures on this one"
        )
    if cores != there and not short and device == "cpu":
        notes.append(
            f"the latencies were recorded with {there} cores for each call, and a replica has {cores}; --measure "
            f"measures with {cores}"
        )
    server = Server(
        seconds=seconds,
        overhead=overhead,
        cores=cores,
        threads=1 if short else cores,
        batching=variant.signature.batch is not None,
        max_batch=variant.signature.max_samples(64),
        device=device,
    )
    return server, notes
