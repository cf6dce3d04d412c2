"""Which system calls an engine process may make, as seccomp filters; all others are refused.

The allowed calls act on the process itself: its memory, threads, open files and connections. Files are opened and
changed as far as Landlock allows it, see :mod:`ingot.runtime.engines.isolation.confinement`.

The lists are what `strace` shows of ONNX Runtime, OpenVINO, PyTorch and AOTInductor, with the other calls of the same
kind that the C library may choose. A refused call fails with EPERM. A call of Linux 5.1 or later fails with ENOSYS, as
on an older kernel, so that the C library uses the older call.
"""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

# seccomp.h, filter.h, audit.h
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _ABOVE, _ATLEAST, _ANYSET = 0x15, 0x25, 0x35, 0x45
_AT_NUMBER, _AT_MACHINE, _AT_ARGUMENTS = 0, 4, 16
_EPERM, _ENOSYS = 1, 38
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From this number on, calls have the same number on both architectures; the first is of Linux 5.1.
_FIRST_NEW = 424

# Each call with its number on x86-64 and on aarch64, if it is there.
_FILES = """
    read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69 pwritev:296:70
    preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 close_range:436:436 dup:32:23 dup2:33 dup3:292:24
    pipe:22 pipe2:293:59 fstat:5:80 ftruncate:77:46 fallocate:285:47 fadvise64:221:223 sendfile:40:71 open:2
    openat:257:56 stat:4 lstat:6 newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21
    faccessat:269:48 faccessat2:439:439 readlink:89 readlinkat:267:78 getdents:78 getdents64:217:61 getcwd:79:17
    chdir:80:49 fchdir:81:50 umask:95:166 memfd_create:319:279
"""
_WAITING = """
    poll:7 ppoll:271:73 select:23 pselect6:270:72 epoll_create:213 epoll_create1:291:20 epoll_ctl:233:21
    epoll_wait:232 epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284 eventfd2:290:19 timerfd_create:283:85
    timerfd_settime:286:86 timerfd_gettime:287:87 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113
    clock_getres:229:114 gettimeofday:96:169 time:201 wait4:61:260 waitid:247:95
"""
_CONNECTIONS = """
    sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockname:51:204
    getpeername:52:205 getsockopt:55:209 setsockopt:54:208
"""
_MEMORY = """
    brk:12:214 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 msync:26:227 madvise:28:233 mincore:27:232
    mbind:237:235 get_mempolicy:239:236 set_mempolicy:238:237 membarrier:324:283 pkey_alloc:330:289
    pkey_free:331:290 pkey_mprotect:329:288
"""
_THREADS = """
    futex:202:98 futex_waitv:449:449 set_robust_list:273:99 rseq:334:293 set_tid_address:218:96 exit:60:93
    exit_group:231:94 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
    sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 getcpu:309:168
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137
    rt_sigsuspend:130:133 sigaltstack:131:132 restart_syscall:219:128 arch_prctl:158 seccomp:317:277
"""
_QUERIES = """
    getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
    getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111 getpgid:121:155 getsid:124:156
    capget:125:90 getpriority:140:141 getrlimit:97:163 getrusage:98:165 times:100:153 sysinfo:99:179
    uname:63:160 getrandom:318:278
"""
# For models that unpack files; Landlock decides where.
_FOLDERS = """
    mkdir:83 mkdirat:258:34 symlink:88 symlinkat:266:36 unlink:87 unlinkat:263:35 rmdir:84
    rename:82 renameat:264:38 renameat2:316:276
"""
# For the same formats: an event loop of Python wakes itself by a pair of sockets. Only streams reach nothing else.
_PAIRS = "socketpair:53:199"
_STREAMS = (0x1, 0x801, 0x80001, 0x80801)  # SOCK_STREAM, with SOCK_NONBLOCK and SOCK_CLOEXEC
# For models in Python that may use the network, as clients.
_CLIENTS = "connect:42:203 sendmmsg:307:269 recvmmsg:299:243"
# Of PyTorch's FileStore, in memory, over which the processes of a group find each other.
_GROUPS = "flock:73:32"
# With a GPU: CUDA's driver locks memory and uses local sockets, timers and, as everywhere, mbind and memfd_create.
_DEVICES = """
    socketpair:53:199 bind:49:200 listen:50:201 accept:43:202 accept4:288:242 connect:42:203 mlock:149:228
    mlock2:325:284 munlock:150:229 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
    timer_delete:226:111 signalfd4:289:74 fsync:74:82 fdatasync:75:83
"""
_OPENING = " open:2 openat:257:56"
_CONNECTING = "socket:41:198 connect:42:203"
_PROGRAMS = "execve:59:221 execveat:322:281 fork:57 vfork:58"
_CHECKED = """
    fcntl:72:25 ioctl:16:29 prctl:157:167 prlimit64:302:261 sched_setaffinity:203:122 kill:62:129 tgkill:234:131
    socket:41:198 clone:56:220 clone3:435:435
"""

# fcntl.h: duplicates, flags and seals. The others send signals to other processes, or lock files of other programs.
_FCNTL = (0, 1, 2, 3, 4, 1030, 1033, 1034)
# ioctls.h: TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# With a GPU, all but those of terminals and sockets, which have these bytes in common.
_IOCTL_BYTE, _IOCTL_REFUSED = 0xFF00, (0x5400, 0x8900)
# prctl.h: PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS,
# PR_SVE_GET_VL, PR_SME_GET_VL, PR_SET_VMA
_PRCTL = (2, 3, 15, 16, 23, 39, 51, 64, 0x53564D41)
# socket.h: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_LOCAL, _NETWORK, _INTERNET = (1,), (1, 2, 10, 16), (2, 10, 16)
# sched.h: all CLONE_NEW..., and CLONE_PARENT, with which the new process would be the server's
_CLONE_OUTSIDE, _CLONE_THREAD = 0x7E028000, 0x10000


def while_loading(*, gpu: bool, unpacks: bool, group: bool, network: bool = False) -> bytes:
    """Return the filter for this process and those that it starts; empty for an unknown processor architecture.

    Args:
        gpu: allow what the libraries of GPUs need.
        unpacks: allow changes to folders.
        group: allow what the processes of a group need; with ``gpu``, sockets too.
        network: allow connections to other machines.
    """
    machine = platform.machine()
    return _while_loading(machine, os.getpid(), gpu=gpu, unpacks=unpacks, group=group, network=network)


def _while_loading(
    machine: str, process: int, *, gpu: bool, unpacks: bool, group: bool, network: bool = False
) -> bytes:
    if machine not in _MACHINES:
        return b""
    calls = _numbers(_CHECKED, machine)
    families = (_NETWORK if group else _LOCAL) if gpu else ()
    ioctl = [_step(_AND, _IOCTL_BYTE), *_denied(_IOCTL_REFUSED), _step(_RETURN, _ALLOW)] if gpu else [_refuse()]
    steps = [
        *_start(machine),
        *_allowed(sorted(_listed(machine, gpu=gpu, unpacks=unpacks, group=group, network=network).values())),
        *(_only_for(_numbers(_PAIRS, machine)["socketpair"], 1, _STREAMS) if unpacks and not gpu else ()),
        *_if_call(calls["ioctl"], 1, [*_allowed(_IOCTL), *ioctl]),
        *_only_for(calls["fcntl"], 1, _FCNTL),
        *_only_for(calls["prctl"], 0, _PRCTL),
        *_only_for(calls["prlimit64"], 0, [0]),
        *_only_for(calls["sched_setaffinity"], 0, [0, process]),
        *_only_for(calls["kill"], 0, [process]),
        *_only_for(calls["tgkill"], 0, [process]),
        *_only_for(calls["socket"], 0, tuple(sorted({*families, *(_INTERNET if network else ())}))),
        *_if_call(calls["clone"], 0, [_step(_ANYSET, _CLONE_OUTSIDE, 0, 1), _refuse(), _step(_RETURN, _ALLOW)]),
        # Its flags are in memory, which a filter cannot read; clone's are not.
        *_denied([calls["clone3"]], _ENOSYS),
        _step(_ATLEAST, _FIRST_NEW, 0, 1),
        _refuse(_ENOSYS),
        _refuse(),
    ]
    return b"".join(steps)


def _listed(machine: str, *, gpu: bool, unpacks: bool, group: bool, network: bool = False) -> dict[str, int]:
    """Return the numbers of the calls that are allowed with any arguments."""
    kinds = [_FILES, _WAITING, _CONNECTIONS, _MEMORY, _THREADS, _QUERIES, _PROGRAMS]
    kinds += [
        kind for kind, wanted in ((_FOLDERS, unpacks), (_GROUPS, group), (_DEVICES, gpu), (_CLIENTS, network)) if wanted
    ]
    return _numbers(" ".join(kinds), machine)


def once_loaded(*, reads: bool = True, connects: bool = True) -> bytes:
    """Return the filter that also forbids starting programs; empty for an unknown processor architecture.

    Args:
        reads: whether files may be opened.
        connects: whether sockets may still be made and connected, as far as they may while loading.
    """
    return _once_loaded(platform.machine(), reads=reads, connects=connects)


def _once_loaded(machine: str, *, reads: bool = True, connects: bool = True) -> bytes:
    if machine not in _MACHINES:
        return b""
    clone = _numbers(_CHECKED, machine)["clone"]
    refused = " ".join((_PROGRAMS, "" if reads else _OPENING, "" if connects else _CONNECTING))
    steps = [
        *_start(machine),
        *_denied(_numbers(refused, machine).values()),
        *_if_call(clone, 0, [_step(_ANYSET, _CLONE_THREAD, 1, 0), _refuse(), _step(_RETURN, _ALLOW)]),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def _numbers(calls: str, machine: str) -> dict[str, int]:
    """Return the numbers of calls, without those that the architecture lacks."""
    column = 1 + [*_MACHINES].index(machine)
    rows = [call.split(":") for call in calls.split()]
    return {row[0]: int(row[column]) for row in rows if len(row) > column}


def _start(machine: str) -> list[bytes]:
    """Load the call's number. On x86-64, bit 30 would select other numbers for the same calls."""
    return [
        _step(_LOAD, _AT_MACHINE),
        _step(_EQUAL, _MACHINES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _AT_NUMBER),
        _step(_ATLEAST, 0x40000000, 0, 1),
        _refuse(_ENOSYS),
    ]


def _allowed(values: Sequence[int]) -> list[bytes]:
    """Allow what is loaded if it is one of some values; adjacent ones, if they are sorted, are compared at once."""
    ends = [index for index, (value, following) in enumerate(pairwise(values), 1) if following != value + 1]
    steps = []
    for first, end in pairwise([0, *ends, len(values)]):
        least, most = values[first], values[end - 1]
        steps += [_step(_ATLEAST, least, 0, 2), _step(_ABOVE, most, 1, 0), _step(_RETURN, _ALLOW)]
    return steps


def _denied(values: Iterable[int], error: int = _EPERM) -> list[bytes]:
    return [step for value in values for step in (_step(_EQUAL, value, 0, 1), _refuse(error))]


def _only_for(number: int, argument: int, values: Sequence[int]) -> list[bytes]:
    """Allow a call only if one of its arguments, counted from 0, is one of some values."""
    return _if_call(number, argument, [*(_allowed(values) if values else ()), _refuse()])


def _if_call(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Decide about a call by the lower half of an argument; ``body`` must return."""
    load = _step(_LOAD, _AT_ARGUMENTS + 8 * argument)
    return [_step(_EQUAL, number, 0, 1 + len(body)), load, *body]


def _refuse(error: int = _EPERM) -> bytes:
    return _step(_RETURN, _ERRNO | error)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
