"""The memory of one call of an ONNX graph, as ONNX Runtime's profiler counts it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import InvalidArgument
from ingot.runtime.engines.ort import ort_session
from ingot.tensors import Array

_IN_USE, _ADDED = "mem_bytes_requested_in_use", "mem_requested_in_use_delta"


def measured(path: Path, inputs: Mapping[str, Array]) -> int:
    """Return the most bytes of tensors that are in use between two operators of a call, without weights and inputs.

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
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            session.run(None, dict(inputs))
        except ort_session.errors_of(ort) as error:
            raise InvalidArgument(f"{path.name} does not run: {ort_session.reason_of(error)}") from error
        events = json.loads(Path(session.end_profiling()).read_text())
    counts = [event["args"] for event in sorted(events, key=lambda event: event["ts"]) if event["cat"] == "Node"]
    counts = [item for item in counts if _IN_USE in item and _ADDED in item]
    if not counts:
        return 0
    weights = int(counts[0][_IN_USE]) - int(counts[0][_ADDED])
    return max(0, max(int(item[_IN_USE]) for item in counts) - weights)
