"""gRPC's client for Node.js, an independent implementation that shares no code with grpcio."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.server.outside import Service
from tests.support import ROOT, RequireTool

CLIENT = Path(__file__).parent / "grpc_js"


@pytest.mark.matrix
@pytest.mark.usefixtures("still_answers")
def test_many_calls_large_ones_deadlines_and_cancellations(service: Service, require_tool: RequireTool) -> None:
    node = require_tool("node")
    if not (CLIENT / "node_modules").is_dir():
        missing = "@grpc/grpc-js is not installed; make tools installs it"
        if os.environ.get("INGOT_REQUIRE_TOOLS") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    command = [node, str(CLIENT / "client.js"), service.grpc, str(ROOT / "protos" / "open_inference.proto")]
    with service.gate.closed():  # the late and the cancelled calls are not answered
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    # Numbers of calls that ended as they should, by kind; see client.js.
    assert json.loads(result.stdout) == {
        "load": 600,
        "large": 8,
        "late": 8,
        "cancelled": 8,
        "beside": 200,  # answered while the others waited
        "unknown": 5,  # NOT_FOUND
    }
