"""What an engine process may do: limits that it sets for itself before it loads a model, and cannot undo.

Each measure is applied where the kernel allows it without privileges. :func:`before_loading` and :func:`after_loading`
return those in force, which the server shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

# prctl.h, sched.h, seccomp.h, filter.h
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x08000000, 0x10000000, 0x40000000, 0x10000
_SET_MODE_FILTER, _TSYNC = 1, 1
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ATLEAST, _ALLSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AT_NUMBER, _AT_MACHINE, _AT_ARGUMENT = 0, 4, 16
_EACCES, _EPERM, _ENOSYS = 13, 1, 38
_CAPABILITY_VERSION = 0x20080522

# sockios.h, if.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_OWN_NETWORK = "own network namespace"
# Whether the processes of a group have their own network namespace, which they share.
_GROUP_NETWORK = "ENGINE_GROUP_NETWORK"

# landlock.h; the numbers of its calls are those of both architectures. Older versions lack the last rights.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _WRITE = 1 << 1, 0x1FF2
_LATER_WRITE = {2: 1 << 13, 3: 1 << 14}

# Variables that engines read; all others, such as passwords and tokens, stay in the server.
_VARIABLES = frozenset(
    ("PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME",
     "VIRTUAL_ENV", "XDG_CACHE_HOME", "TERM", "SSL_CERT_FILE")
)  # fmt: skip
_PREFIXES = ("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "ORT_", "OV_", "TORCH",
             "PYTORCH_", "CUDA", "NVIDIA_", "CUDNN_", "MALLOC_", "GLIBC_", "TBB_")  # fmt: skip
_SECRETS = ("PASSWORD", "SECRET", "TOKEN", "CREDENTIAL", "_KEY")


class _SystemCalls(NamedTuple):
    """The numbers of system calls on one processor architecture."""

    machine: int  # AUDIT_ARCH_... of audit.h
    seccomp: int
    socket: int
    kill: int
    tgkill: int
    clone: int
    clone3: int
    forbidden: tuple[int, ...]
    programs: tuple[int, ...]  # those that start one


# forbidden: ptrace, process_vm_readv, process_vm_writev, tkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_open,
# pidfd_send_signal, pidfd_getfd, process_madvise, io_uring_setup, bpf, perf_event_open, userfaultfd, add_key,
# request_key, keyctl, mount, umount2, unshare, setns, init_module, finit_module, kexec_load, open_by_handle_at, setsid,
# setpgid.
_NUMBERS: Mapping[str, _SystemCalls] = {
    "x86_64": _SystemCalls(
        0xC000003E, 317, 41, 62, 234, 56, 435,
        (101, 310, 311, 200, 129, 297, 434, 424, 438, 440, 425, 321, 298, 323, 248, 249, 250, 165, 166, 272, 308, 175,
         313, 246, 304, 112, 109),
        (59, 322, 57, 58),
    ),
    "aarch64": _SystemCalls(
        0xC00000B7, 277, 198, 129, 131, 220, 435,
        (117, 270, 271, 130, 138, 240, 434, 424, 438, 440, 425, 280, 241, 282, 217, 218, 219, 40, 39, 97, 268, 105,
         273, 104, 265, 157, 154),
        (221, 281),
    ),
}  # fmt: skip


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an engine process receives, with this process's module path."""
    kept = {
        name: value
        for name, value in variables.items()
        if (name in _VARIABLES or name.startswith(_PREFIXES)) and not any(word in name for word in _SECRETS)
    }
    # Namespaces can be left only by a process with one thread, and numpy's library would start others.
    kept["OPENBLAS_NUM_THREADS"] = "1"
    return {**kept, "PYTHONPATH": os.pathsep.join(item or str(Path.cwd()) for item in sys.path)}


def before_loading(
    parent: int, memory: int | None, *, gpu: bool, unpacks: bool, join: Callable[[], None] | None = None
) -> list[str]:
    """Confine this process, which must have one thread; return the measures in force.

    Args:
        parent: the server's process id, or that of :func:`before_starting_group`; this process ends with it.
        memory: most bytes of private memory, None for no limit.
        gpu: whether GPUs are used; their libraries need local sockets.
        unpacks: whether loading the model may unpack files into the folder for temporary ones.
        join: connects this process with the others of its group, before sockets are forbidden. With GPUs, these may
            connect later, so sockets remain.
    """
    libc = _end_with(parent)
    measures = []
    if memory is not None:
        # Private writable memory: weights that are mapped from files, and shared memory, do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        measures.append(f"at most {memory >> 20} MiB of private memory")
    measures += _namespaces(libc) if join is None else _of_group()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        measures.append("no new privileges")
    folders = ["/dev/shm", tempfile.gettempdir()] if unpacks else []
    if _read_only(libc, folders):
        measures.append(f"no writing of files{' but temporary ones' if unpacks else ''}")
    if join is not None:
        join()
    between = gpu and join is not None
    if _filter(libc, _first_rules(gpu=gpu, network=between)):
        sockets = "" if between else f"no {'network ' if gpu else ''}sockets, "
        measures.append(f"{sockets}no access to other processes")
    return measures


def before_starting_group(parent: int) -> None:
    """Confine the process that starts the processes of a group, which have its network namespace and no privileges."""
    libc = _end_with(parent)
    own_network = _namespaces(libc, loopback=True)[:1] == [_OWN_NETWORK]
    os.environ[_GROUP_NETWORK] = "1" if own_network else ""
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _of_group() -> list[str]:
    """Return the measures that :func:`before_starting_group` has taken for this process."""
    libc = ctypes.CDLL(None)
    dropped = libc.capset(struct.pack("=II", _CAPABILITY_VERSION, 0), bytes(24)) == 0
    return ([_OWN_NETWORK] if os.environ.get(_GROUP_NETWORK) else []) + (["no capabilities"] if dropped else [])


def _end_with(parent: int) -> ctypes.CDLL:
    """Let this process end with its parent, and without a core dump; return the C library."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return libc


def limit_calls(nbytes: int) -> None:
    """Limit the private memory of this process to ``nbytes`` bytes more than it holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    most = pages * os.sysconf("SC_PAGE_SIZE") + nbytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def after_loading() -> list[str]:
    """Forbid starting programs, which loading may need; return the measures in force."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ["no programs"] if _filter(libc, _last_rules()) else []


def _namespaces(libc: ctypes.CDLL, *, loopback: bool = False) -> list[str]:
    """Give up the network, except for a loopback interface if wanted, and the privileges of root."""
    root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    measures = []
    if libc.unshare(_CLONE_NEWNET | _CLONE_NEWIPC | (0 if root else _CLONE_NEWUSER)) == 0:
        measures.append(_OWN_NETWORK)
        if not root:
            # The same user inside, so that files look as they are. A kernel that forbids this shows another one.
            maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
            with contextlib.suppress(OSError):
                for name, content in maps.items():
                    Path("/proc/self", name).write_text(content)
        if loopback:
            with contextlib.suppress(OSError), socket.socket() as control:
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))
    header = struct.pack("=II", _CAPABILITY_VERSION, 0)
    if libc.capset(header, bytes(24)) == 0:
        measures.append("no capabilities")
    return measures


def _read_only(libc: ctypes.CDLL, folders: list[str]) -> bool:
    """Forbid changes to files outside some folders, with Landlock; return whether that succeeded.

    Files that are open already, and existing devices, can be written.
    """
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    rights = _WRITE | sum(right for least, right in _LATER_WRITE.items() if version >= least)
    rules = libc.syscall(_CREATE_RULESET, ctypes.c_char_p(struct.pack("=Q", rights)), ctypes.c_size_t(8), 0)
    if version < 1 or rules < 0:
        return False
    try:
        for folder, allowed in (("/dev", _WRITE_FILE), *((folder, rights) for folder in folders)):
            with contextlib.suppress(OSError):
                handle = os.open(folder, os.O_PATH | os.O_CLOEXEC)
                libc.syscall(_ADD_RULE, rules, 1, ctypes.c_char_p(struct.pack("=Qi", allowed, handle)), 0)
                os.close(handle)
        return bool(libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


def _first_rules(*, gpu: bool, network: bool) -> list[bytes]:
    calls = _NUMBERS.get(platform.machine())
    if calls is None:
        return []
    local = [1] if gpu else []  # AF_UNIX
    return [
        *_start(calls),
        *([] if network else _only_for(calls.socket, local)),
        *_only_for(calls.kill, [os.getpid()]),
        *_only_for(calls.tgkill, [os.getpid()]),
        *_denied(calls.forbidden, _EPERM),
        _step(_RETURN, _ALLOW),
    ]


def _last_rules() -> list[bytes]:
    calls = _NUMBERS.get(platform.machine())
    if calls is None:
        return []
    return [
        *_start(calls),
        *_denied(calls.programs, _EPERM),
        # glibc falls back to clone, whose flags a filter can read.
        *_denied([calls.clone3], _ENOSYS),
        _step(_EQUAL, calls.clone, 0, 4),
        _step(_LOAD, _AT_ARGUMENT),
        _step(_ALLSET, _CLONE_THREAD, 1, 0),
        _step(_RETURN, _ERRNO | _EPERM),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ALLOW),
    ]


def _start(calls: _SystemCalls) -> list[bytes]:
    """Load the call's number. On x86-64, bit 30 would select other numbers for the same calls."""
    return [
        _step(_LOAD, _AT_MACHINE),
        _step(_EQUAL, calls.machine, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _AT_NUMBER),
        _step(_ATLEAST, 0x40000000, 0, 1),
        _step(_RETURN, _ERRNO | _ENOSYS),
    ]


def _denied(numbers: Iterable[int], error: int) -> list[bytes]:
    steps = []
    for number in numbers:
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | error)]
    return steps


def _only_for(number: int, values: list[int]) -> list[bytes]:
    """Allow a call only if its first argument is one of some values."""
    checks = []
    for value in values:
        checks += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW)]
    body = [_step(_LOAD, _AT_ARGUMENT), *checks, _step(_RETURN, _ERRNO | _EACCES)]
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter(libc: ctypes.CDLL, steps: list[bytes]) -> bool:
    """Install a seccomp filter for all threads; return whether that succeeded."""
    if not steps:
        return False
    program = _Program(len(steps), b"".join(steps))
    number = _NUMBERS[platform.machine()].seccomp
    return bool(libc.syscall(number, _SET_MODE_FILTER, _TSYNC, ctypes.byref(program)) == 0)
