"""What code in an engine process cannot do: a program confines itself in the same way, and tries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.isolation import confinement
from tests.support import ROOT

PROGRAM = """
import ctypes, json, os, signal, socket, subprocess, sys, tempfile, threading
from pathlib import Path
from ingot.runtime.isolation import confinement

own, unpacks = Path(sys.argv[1]), sys.argv[2] == "unpacks"
parent = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
server = socket.create_server(("127.0.0.1", 0))
measures = confinement.before_loading(parent, 1 << 30, gpu=False, unpacks=unpacks)

def outcome(attempt):
    try:
        return str(attempt())
    except (OSError, MemoryError) as error:
        return type(error).__name__

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def in_a_thread(attempt):
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(attempt)))
    thread.start()
    thread.join()
    return found[0]

attempts = {
    "read": lambda: (own / "kept").read_text(),
    "tcp": lambda: socket.socket(),
    "udp": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "local socket": lambda: socket.socket(socket.AF_UNIX),
    "connect": lambda: socket.create_connection(server.getsockname()),
    "signal": lambda: os.kill(parent, 0),
    "signal to all": lambda: os.kill(-1, 0),
    "trace": lambda: call("ptrace", 16, parent, 0, 0),
    "memory of others": lambda: Path(f"/proc/{parent}/mem").open("rb").read(1),
    "environment of others": lambda: Path(f"/proc/{parent}/environ").read_bytes(),
    "write": lambda: (own / "file").write_text("x"),
    "remove": lambda: (own / "kept").unlink(),
    "kernel setting": lambda: Path("/proc/sys/kernel/core_pattern").open("w"),
    "temporary file": lambda: tempfile.TemporaryFile().close(),
    "new namespace": lambda: call("unshare", 0x10000000),
    "a gigabyte": lambda: len(bytearray(1 << 30)),
    "own signal": lambda: os.kill(os.getpid(), 0),
    "device": lambda: Path("/dev/null").write_text("x"),
}
found = {name: outcome(attempt) for name, attempt in attempts.items()}
found["program before"] = outcome(lambda: subprocess.run(["true"]).returncode)
later = confinement.after_loading()
found["program"] = outcome(lambda: subprocess.run(["true"]).returncode)
found["fork"] = outcome(os.fork)
found["thread"] = in_a_thread(lambda: "done")
found["tcp in a thread"] = in_a_thread(socket.socket)
print(json.dumps({"measures": measures + later, "found": found}))
"""


def attempted(folder: Path, *, unpacks: bool) -> dict[str, Any]:
    (folder / "kept").write_text("kept")
    command = [sys.executable, "-c", PROGRAM, str(folder), "unpacks" if unpacks else ""]
    environment = {**confinement.environment(os.environ), "TMPDIR": "/tmp"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.parametrize("unpacks", [False, True])
def test_code_in_an_engine_process_reaches_nothing_outside(tmp_path: Path, unpacks: bool) -> None:
    content = attempted(tmp_path, unpacks=unpacks)
    measures, found = content["measures"], content["found"]
    if "no sockets, no access to other processes" not in measures:
        pytest.skip("seccomp is not available here")
    allowed = {"own signal": "None", "read": "kept", "device": "1", "program before": "0", "thread": "done"}
    unchecked = set()
    writes = {"write", "remove", "temporary file", "kernel setting"}
    if not any(measure.startswith("no writing of files") for measure in measures):
        unchecked = writes
    elif unpacks:
        # The test's folder is a temporary one, too.
        allowed |= {"write": "1", "remove": "None", "temporary file": "None"}
    if "no capabilities" not in measures or (os.geteuid() and "own network namespace" not in measures):
        unchecked |= {"memory of others", "environment of others"}
    checked = {name: outcome for name, outcome in found.items() if name not in unchecked}
    assert {name: checked[name] for name in allowed if name in checked} == {
        name: outcome for name, outcome in allowed.items() if name in checked
    }
    refused = {name: outcome for name, outcome in checked.items() if name not in allowed}
    assert set(refused.values()) <= {"PermissionError", "MemoryError", "OSError", "FileNotFoundError"}, refused


def test_only_variables_of_engines_pass() -> None:
    given = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "ORT_API_KEY": "secret",
        "TORCH_TOKEN": "secret",
        "INGOT_KEY_PASSWORD": "secret",
        "AWS_ACCESS_KEY_ID": "secret",
        "HTTPS_PROXY": "http://user:secret@host",
        "SSH_AUTH_SOCK": "/secret",
        "DATABASE_URL": "secret",
    }
    passed = confinement.environment(given)
    assert set(passed) == {"PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "OPENBLAS_NUM_THREADS"}
