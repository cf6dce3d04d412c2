"""What code in an engine process cannot do: a program confines itself in the same way, and tries."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.runtime.engines.isolation import confinement, system_calls
from tests.support import ROOT

# uretprobe and uprobe, which no filter sees, and which end a process that calls them.
_ALWAYS_THERE = (335, 336)
_STATUS = ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns", "st_nlink")

PROGRAM = """
import ctypes, fcntl, itertools, json, os, resource, signal, socket, subprocess, sys
import tempfile, threading, time
from pathlib import Path
from ingot.runtime.engines.isolation import confinement

own, unpacks, gpu = Path(sys.argv[1]), sys.argv[2] == "unpacks", sys.argv[2] == "gpu"
parent, victim = os.getppid(), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
server = socket.create_server(("127.0.0.1", 0))
ours, theirs = socket.socketpair()
compiled = own.parent / "compiled"
measures = confinement.before_loading(parent, 1 << 30, gpu=gpu, unpacks=unpacks, cache=compiled if gpu else None)

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

def name_of_a_thread():
    # As CUDA's driver does it, which fails if it cannot.
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("named")

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
    "compiled file": lambda: (compiled / "model.engine").write_text("x"),
    "temporary file": lambda: tempfile.TemporaryFile().close(),
    "new namespace": lambda: call("unshare", 0x10000000),
    "a gigabyte": lambda: len(bytearray(1 << 30)),
    "own signal": lambda: os.kill(os.getpid(), 0),
    "device": lambda: Path("/dev/null").write_text("x"),
    "terminal": lambda: os.open("/dev/ptmx", os.O_RDWR),
    "shared memory": lambda: Path("/dev/shm", f"ingot-test-{os.getpid()}").write_text("x"),
    "pair of sockets": lambda: socket.socketpair(type=socket.SOCK_DGRAM),
    "name of a thread": lambda: in_a_thread(name_of_a_thread),
    "limits of others": lambda: resource.prlimit(victim, resource.RLIMIT_CPU, (1, 1)),
    "mode": lambda: (own / "kept").chmod(0o666),
    "owner": lambda: os.chown(own / "kept", os.getuid(), os.getgid()),
    "times": lambda: os.utime(own / "kept"),
    "attribute": lambda: os.setxattr(own / "kept", "user.x", b"x"),
    "priority of others": lambda: os.setpriority(os.PRIO_PROCESS, victim, 19),
    "cores of others": lambda: os.sched_setaffinity(victim, os.sched_getaffinity(0)),
    "signals of a connection": lambda: fcntl.fcntl(ours, fcntl.F_SETOWN, victim),
    "lock": lambda: fcntl.flock(os.open(own / "kept", os.O_RDONLY), fcntl.LOCK_EX),
    "lease": lambda: fcntl.fcntl(os.open(own / "kept", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "user namespace": lambda: call("syscall", 56 if os.uname().machine == "x86_64" else 220, 0x10000000, 0, 0, 0, 0),
    "session": lambda: subprocess.run(["true"], start_new_session=True),
    "own cores": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "own limit": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
}
found = {name: outcome(attempt) for name, attempt in attempts.items()}
found["program before"] = outcome(lambda: subprocess.run(["true"]).returncode)

# Calls by number, with arguments that mean another process, a file or a folder.
listed, tried = json.loads(sys.argv[4])
kept = os.open(own / "kept", os.O_RDONLY)
buffer, path = ctypes.create_string_buffer(b"\1" * 256), ctypes.create_string_buffer(os.fsencode(own / "kept"))
at, text = ctypes.addressof(buffer), ctypes.addressof(path)
first, second, third = (victim, text, -100, kept, 0, 1), (text, victim, at, 0, 9, kept), (at, 0o777, 0, victim)
arguments = [[*map(ctypes.c_long, (*each, at, 0, 0))] for each in itertools.product(first, second, third)]

def refused(number):
    return all(libc.syscall(number, *each) < 0 and ctypes.get_errno() in (1, 38) for each in arguments)

def in_a_process(attempt):
    child = os.fork()
    if not child:
        confinement.after_loading()
        attempt()
    os.waitpid(child, 0)

def try_all():
    for number in set(range(600)) - set(listed):
        if not refused(number):
            os.write(output, f"{number} ".encode())
    os._exit(0)

def try_one(number):
    threading.Thread(target=lambda: (time.sleep(0.02), os._exit(0)), daemon=True).start()  # some calls wait
    refused(number)
    os._exit(0)

reached = None
if any("no access to other processes" in measure for measure in measures):
    result, output = os.pipe()
    in_a_process(try_all)
    os.close(output)
    reached = [*map(int, os.read(result, 1 << 16).split())]
    for number in tried:
        in_a_process(lambda: try_one(number))
later = confinement.after_loading()
found["program"] = outcome(lambda: subprocess.run(["true"]).returncode)
found["fork"] = outcome(os.fork)
found["thread"] = in_a_thread(lambda: "done")
found["tcp in a thread"] = in_a_thread(socket.socket)
print(json.dumps({"measures": measures + later, "found": found, "reached": reached}))
"""


def state_of(process: int, folder: Path) -> tuple[Any, ...]:
    """Return the state of a process and of the files in a folder that code in another process could change."""
    files = [(item.name, *(getattr(item.stat(), name) for name in _STATUS)) for item in sorted(folder.iterdir())]
    limits = [resource.prlimit(process, number) for number in range(resource.RLIMIT_RTTIME + 1)]
    cores = os.sched_getaffinity(process)
    policy = (os.sched_getscheduler(process), os.getpriority(os.PRIO_PROCESS, process))
    return files, limits, cores, policy, os.listxattr(folder / "kept"), (folder / "kept").read_text()


def attempted(folder: Path, kind: str, victim: int) -> dict[str, Any]:
    """Run the program on the files in ``folder`` and the process ``victim``."""
    machine = os.uname().machine
    options = {"gpu": kind == "gpu", "unpacks": kind == "unpacks", "group": False}
    listed = {**system_calls._listed(machine, **options), **system_calls._numbers(system_calls._CHECKED, machine)}
    calls = json.dumps([[*listed.values(), *_ALWAYS_THERE], [*listed.values()] if kind == "onnx" else []])
    for name in ("temporary", "compiled"):
        (folder / name).mkdir()
    environment = {**confinement.environment(os.environ), "TMPDIR": str(folder / "temporary")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "own"), kind, str(victim), calls],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["onnx", "unpacks", "gpu"])
def test_code_in_an_engine_process_reaches_nothing_outside(tmp_path: Path, kind: str) -> None:
    """Also by the number of each call: those that are not listed are refused, and those that are change nothing."""
    (own := tmp_path / "own").mkdir()
    (own / "kept").write_text("kept")
    victim = subprocess.Popen(["sleep", "600"])
    try:
        before = state_of(victim.pid, own)
        content = attempted(tmp_path, kind, victim.pid)
        after = state_of(victim.pid, own)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    measures, found = content["measures"], content["found"]
    if content["reached"] is None:
        pytest.skip("seccomp is not available here")
    assert content["reached"] == []
    allowed = {"own signal": "None", "read": "kept", "device": "1", "program before": "0", "thread": "done"}
    allowed |= {"own cores": "None", "own limit": "None"}
    unchecked = set()
    if not any(measure.startswith("no writing of files") for measure in measures):
        unchecked = {
            "write",
            "remove",
            "temporary file",
            "compiled file",
            "kernel setting",
            "terminal",
            "shared memory",
            "name of a thread",
        }
    else:
        assert after == before
    allowed |= {"temporary file": "None"} if kind == "unpacks" else {}
    if kind == "gpu":
        allowed |= {"name of a thread": "None", "compiled file": "1"}
        unchecked |= {"local socket", "pair of sockets"}
    if "no capabilities" not in measures or (os.geteuid() and "own network namespace" not in measures):
        unchecked |= {"memory of others", "environment of others"}
    checked = {name: outcome for name, outcome in found.items() if name not in unchecked}
    assert {name: checked[name] for name in allowed if name in checked} == {
        name: outcome for name, outcome in allowed.items() if name in checked
    }
    refused = {name: outcome for name, outcome in checked.items() if name not in allowed}
    assert set(refused.values()) <= {"PermissionError", "MemoryError", "OSError", "FileNotFoundError"}, refused


def decided(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """Return the decision of a filter, as the kernel computes it."""
    steps: list[tuple[int, int, int, int]] = [*struct.iter_unpack("=HBBI", program)]
    data = struct.pack("=IIQ6Q", number, system_calls._MACHINES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    value = place = 0
    while True:
        code, if_true, if_false, operand = steps[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            value &= operand
        else:
            is_true = {0x15: value == operand, 0x25: value > operand, 0x35: value >= operand, 0x45: value & operand}
            place += if_true if is_true[code] else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_decides_alike_on_each_architecture(machine: str) -> None:
    allow, refuse, unknown = 0x7FFF0000, 0x50001, 0x50026
    checked = system_calls._numbers(system_calls._CHECKED, machine)
    for gpu, group in ((False, False), (True, False), (True, True)):
        options = {"gpu": gpu, "group": group, "unpacks": True}
        program = system_calls._while_loading(machine, 7, **options)
        calls = {name: partial(decided, program, machine, number) for name, number in checked.items()}
        listed = system_calls._listed(machine, **options).values()
        for number in range(600):
            expected = allow if number in listed else unknown if number >= 424 else refuse
            assert number in checked.values() or decided(program, machine, number) == expected, number
        assert calls["clone3"]() == unknown
        assert calls["prlimit64"](0) == calls["kill"](7) == calls["tgkill"](7) == calls["clone"](0x3D0F00) == allow
        assert {calls[name](8) for name in ("prlimit64", "kill", "tgkill", "sched_setaffinity", "prctl")} == {refuse}
        assert {calls["clone"](flag) for flag in (0x10000000, 0x20000, 0x8000)} == {refuse}
        assert [calls["fcntl"](0, command) for command in (2, 8, 10, 1024, 6, 37)] == [allow, *[refuse] * 5]
        # Is it a terminal; inject into it; send signals; a call of NVIDIA's driver
        assert [calls["ioctl"](0, command) for command in (0x5401, 0x5412, 0x8901)] == [allow, refuse, refuse]
        assert calls["ioctl"](0, 0xC020462A) == (allow if gpu else refuse)
        sockets = [allow if gpu else refuse, allow if gpu and group else refuse, refuse]
        assert [calls["socket"](family) for family in (1, 2, 17)] == sockets


def test_only_variables_of_engines_pass() -> None:
    given = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_DEBUG": "INFO",
        "TRITON_PTXAS_PATH": "/bin/ptxas",
        "ORT_API_KEY": "secret",
        "TORCH_TOKEN": "secret",
        "TRITON_DB_PASS": "secret",
        "TRITON_AUTH": "secret",
        "NCCL_passwd": "secret",
        "NVIDIA_APIKEY": "secret",
        "CUDA_CREDS": "secret",
        "INGOT_KEY_PASSWORD": "secret",
        "INGOT_PURE": "1",
        "AWS_ACCESS_KEY_ID": "secret",
        "HTTPS_PROXY": "http://user:secret@host",
        "SSH_AUTH_SOCK": "/secret",
        "DATABASE_URL": "secret",
    }
    passed = confinement.environment(given)
    engines = {"PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG"}
    own = {"INGOT_PURE", "PYTHONPATH", "OPENBLAS_NUM_THREADS"}
    assert set(passed) == {*engines, *own, "TRITON_PTXAS_PATH"}


def test_processes_do_not_get_the_folders_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While OpenCV is imported, sys.path has its folder, whose modules hide those of the standard library."""
    package, alone = tmp_path / "site" / "cv2", tmp_path / "alone"
    for folder in (package, alone):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    path = [str(package.parent), str(package), str(alone)]
    monkeypatch.setattr(sys, "path", path)
    assert confinement.environment({})["PYTHONPATH"].split(os.pathsep) == [path[0], path[2]]
