"""The memory of one call of an ONNX graph, as ONNX Runtime's profiler counts it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ingot.errors import InvalidArgument
from ingot.runtime.engines.ort import ort_session
from ingot.tensors import Array

_IN_USE, _ADDED = "mem_bytes_requested_in_use", "mem_requested_in_use_delta"
# Rounded up by the allocator: the bytes in use, and the most so far, with what operators free before they end.
_ROUNDED, _PEAK = "mem_bytes_in_use", "mem_in_use_peak"


def measured(path: Path, inputs: Mapping[str, Array]) -> int:
    """Return the most bytes that are in use during a call on one thread, without weights and inputs.

    Workspaces of operators count: a convolution's may exceed its output.

    It is 0 if this version of ONNX Runtime does not count them.

    Raises:
        InvalidArgument: the graph does not load or run.
    """
    ort = ort_session.package()
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        options = ort_session.options_of(ort, path, None)
        options.intra_op_num_threads = 1
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        try:
            session = ort_session.create(ort, path, options, ["CPUExecutionProvider"])
            session.run(None, dict(inputs))
        except ort_session.errors_of(ort) as error:
            raise InvalidArgument(f"{path.name} does not run: {ort_session.reason_of(error)}") from error
        events = json.loads(Path(session.end_profiling()).read_text())
    counts = [event["args"] for event in sorted(events, key=lambda event: event["ts"]) if event["cat"] == "Node"]
    counts = [item for item in counts if _IN_USE in item and _ADDED in item]
    if not counts:
        return 0
    weights = int(counts[0][_IN_USE]) - int(counts[0][_ADDED])
    most = max(int(item[_IN_USE]) + space for item, space in zip(counts, _workspaces(counts), strict=True))
    return max(0, most - weights)


def _workspaces(counts: Sequence[Mapping[str, str]]) -> Iterator[int]:
    """Yield the bytes that each operator freed before it ended, where they raised the peak."""
    before = 0
    for item in counts:
        peak = int(item.get(_PEAK, 0))
        yield peak - int(item[_ROUNDED]) if peak > before else 0
        before = peak
