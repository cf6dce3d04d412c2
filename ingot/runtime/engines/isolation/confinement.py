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
from collections.abc import Callable, Mapping
from pathlib import Path

from ingot import _build
from ingot.runtime.engines.isolation import system_calls

# prctl.h, sched.h, seccomp.h, capability.h
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
_SET_MODE_FILTER, _TSYNC = 1, 1
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_FILTER_STEP = 8  # bytes
_CAPABILITY_VERSION = 0x20080522

# sockios.h, if.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_OWN_NETWORK = "own network namespace"
# Whether the processes of a group have their own network namespace, which they share.
_GROUP_NETWORK = "ENGINE_GROUP_NETWORK"

# landlock.h; the numbers of its calls are those of both architectures. Older versions lack the last rights.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _WRITE, _TRUNCATE, _IOCTL_DEVICE = 1 << 1, 0x1FF2, 1 << 14, 1 << 15
_LATER_WRITE = {2: 1 << 13, 3: _TRUNCATE, 5: _IOCTL_DEVICE}
# Not /dev as a whole: it has disks, terminals, and the shared memory of other programs.
_DEVICES = ("null", "zero", "full", "random", "urandom")
_GPU_DEVICES = ("nvidia*", "nvhost*", "nvmap", "dri", "kfd", "dxg", "infiniband")

# Variables that engines read, and the one that chooses Ingot's build; all others, such as passwords and tokens, stay in
# the server.
_VARIABLES = frozenset(
    ("PATH", "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME",
     "VIRTUAL_ENV", "XDG_CACHE_HOME", "TERM", "SSL_CERT_FILE", _build.PURE)
)  # fmt: skip
_PREFIXES = ("LC_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "ORT_", "OV_", "TORCH",
             "PYTORCH_", "TRITON_", "CUDA", "CUBLAS", "CUDNN_", "NCCL_", "NVIDIA_", "MALLOC_", "GLIBC_",
             "TBB_")  # fmt: skip
_SECRETS = ("PASS", "SECRET", "TOKEN", "CRED", "KEY", "AUTH")


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an engine process receives, with this process's module path."""
    kept = {
        name: value
        for name, value in variables.items()
        if (name in _VARIABLES or name.startswith(_PREFIXES)) and not any(word in name.upper() for word in _SECRETS)
    }
    # Namespaces can be left only by a process with one thread, and numpy's library would start others.
    kept["OPENBLAS_NUM_THREADS"] = "1"
    return {**kept, "PYTHONPATH": module_path()}


def module_path() -> str:
    """Return this process's module path, for the processes that it starts.

    Folders of packages in it are left out: OpenCV adds its own while a thread imports it, whose ``typing`` would hide
    that of the standard library.
    """
    found = [item or str(Path.cwd()) for item in sys.path]
    return os.pathsep.join(
        item for item in found if not (str(Path(item).parent) in found and Path(item, "__init__.py").is_file())
    )


def before_loading(
    parent: int,
    memory: int | None,
    *,
    gpu: bool,
    unpacks: bool,
    cache: Path | None = None,
    join: Callable[[], None] | None = None,
    network: bool = False,
) -> list[str]:
    """Confine this process, which must have one thread; return the measures in force.

    Args:
        parent: the server's process id, or that of :func:`before_starting_group`; this process ends with it.
        memory: most bytes of private memory, None for no limit.
        gpu: whether GPUs are used; their libraries need local sockets.
        unpacks: whether loading the model may unpack files into the folder for temporary ones.
        cache: the folder in which TensorRT keeps what it compiled; None for other engines.
        join: connects this process with the others of its group, before sockets are forbidden. With GPUs, these may
            connect later, so sockets remain.
        network: whether connections to other machines are allowed.
    """
    libc = _end_with(parent)
    measures = []
    if memory is not None:
        # Private writable memory: weights that are mapped from files, and shared memory, do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        measures.append(f"at most {memory >> 20} MiB of private memory")
    measures += _namespaces(libc, network=network) if join is None else _of_group()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        measures.append("no new privileges")
    folders = [tempfile.gettempdir(), *(["/dev/shm"] if gpu else [])] if unpacks else []
    folders += [str(cache)] if cache is not None else []
    if _read_only(libc, folders, gpu=gpu):
        but = " but temporary ones" if unpacks else " but TensorRT's" if cache is not None else ""
        measures.append(f"no writing of files{but}")
    if join is not None:
        join()
    group = join is not None
    if _filter(libc, system_calls.while_loading(gpu=gpu, unpacks=unpacks, group=group, network=network)):
        sockets = "" if network or (gpu and group) else f"no {'network ' if gpu else ''}sockets, "
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


def after_loading(*, reads: bool = True, connects: bool = True) -> list[str]:
    """Forbid what only loading needs; return the measures in force.

    Args:
        reads: whether files may still be opened; programs may not be started.
        connects: whether the network, if it was allowed while loading, still is; otherwise its connections are closed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not _filter(libc, system_calls.once_loaded(reads=reads, connects=connects)):
        return []
    if not connects:
        _close_connections()
    found = ["no programs", *([] if connects else ["no network once loaded"])]
    return found if reads else [*found, "no opening of files"]


def _close_connections() -> None:
    """Close the connections to other machines, which could be used without being made again."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for handle in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                os.dup2(nothing, handle, inheritable=False)
    os.close(nothing)


def _namespaces(libc: ctypes.CDLL, *, loopback: bool = False, network: bool = False) -> list[str]:
    """Give up the network, except for a loopback interface or all of it if wanted, and the privileges of root."""
    root = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    measures = []
    if libc.unshare((0 if network else _CLONE_NEWNET) | _CLONE_NEWIPC | (0 if root else _CLONE_NEWUSER)) == 0:
        measures += [] if network else [_OWN_NETWORK]
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


def _read_only(libc: ctypes.CDLL, folders: list[str], *, gpu: bool) -> bool:
    """Forbid changes to files outside some folders, with Landlock; return whether that succeeded.

    Files that are open already can be written, and devices without effect on others, or with ``gpu`` those of GPUs.
    """
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    rights = _WRITE | sum(right for least, right in _LATER_WRITE.items() if version >= least)
    rules = libc.syscall(_CREATE_RULESET, ctypes.c_char_p(struct.pack("=Q", rights)), ctypes.c_size_t(8), 0)
    if version < 1 or rules < 0:
        return False
    names = (*_DEVICES, *(_GPU_DEVICES if gpu else ()))
    allowed = {str(path): _WRITE_FILE | _IOCTL_DEVICE for name in names for path in Path("/dev").glob(name)}
    allowed |= dict.fromkeys(folders, rights)
    if gpu:  # CUDA's driver names its threads by writing /proc/self/task/*/comm, and fails if it cannot
        allowed["/proc/self/task"] = _WRITE_FILE | _TRUNCATE
    try:
        for path, wanted in allowed.items():
            with contextlib.suppress(OSError):
                handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rule = struct.pack("=Qi", wanted & rights, handle)
                libc.syscall(_ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0)
                if not path.startswith("/proc"):  # whose folders change their inodes unless they stay open
                    os.close(handle)
        return bool(libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter(libc: ctypes.CDLL, steps: bytes) -> bool:
    """Install a seccomp filter for all threads; return whether that succeeded."""
    if not steps:
        return False
    program = _Program(len(steps) // _FILTER_STEP, steps)
    number = _SECCOMP[platform.machine()]
    return bool(libc.syscall(number, _SET_MODE_FILTER, _TSYNC, ctypes.byref(program)) == 0)
