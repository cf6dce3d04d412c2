"""The processor's instruction sets for low precision, and a way to deny a run its matrix units."""

from __future__ import annotations

import ctypes
import os
import struct

from ingot.runtime.machine import devices

_SETS = ("amx_int8", "amx_bf16", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni")

# Of a process that asks for the registers of the matrix units: arch_prctl(ARCH_REQ_XCOMP_PERM, ...) on x86-64.
_CALL, _REQUEST = 158, 0x1023
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def describe(amx: bool = True) -> str:
    """Return which of the instruction sets for small numbers are here."""
    held = [name for name in _SETS if name in devices.cpu_features().split() and (amx or not name.startswith("amx"))]
    return ", ".join(held) + ("" if amx else " (AMX denied)")


def deny_amx() -> None:
    """Refuse this process and its children the matrix units, as if the processor had none.

    Linux gives a process the units' registers on request; a filter of system calls refuses it, and engines then take
    the kernels that they have for processors without.

    Raises:
        OSError: the system does not take the filter.
    """
    steps = (
        (_LOAD, 0, 0, 0),  # the number of the call
        (_EQUAL, 0, 3, _CALL),
        (_LOAD, 0, 0, 16),  # its first argument
        (_EQUAL, 0, 1, _REQUEST),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
