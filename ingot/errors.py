"""Every error that Ingot raises on purpose, with a transport-neutral code.

    IngotError
    ├── InvalidArgument      the caller's input is wrong (bad tensor, bad reference, bad option)
    │   ├── InvalidArchive   a file is not an archive, or is damaged
    │   ├── Untrusted        no signature vouches for an archive, and the trust policy asks for one
    │   ├── ExportError      the model cannot be captured or lowered
    │   │   ├── ParityError  the exported graph does not equal the PyTorch model
    │   │   └── RejectedInputs  the model does not run on some inputs
    │   ├── QuantizationError  the model cannot be quantized, or its answers become useless
    │   └── TooLarge         the request is larger than the limit
    ├── NotFound             no such model, version, reference or file
    ├── PermissionDenied     a registry or storage service refuses access
    │   └── Unauthenticated  it asks for credentials, or does not accept those that were sent
    ├── AlreadyExists        an immutable name is taken
    │   └── TagMoved         a tag points to something else than expected: somebody else was faster
    ├── StorageFull          the disk or its quota is full
    ├── Unsupported          understood, but this server or build does not do it
    ├── Unavailable          not now: loading, draining or overloaded; try again later
    │   └── Transient        a registry or the way to it failed, which may pass; it was tried again some times
    ├── DeadlineExceeded     the request's own timeout passed before an answer was ready
    └── InternalError        our fault; clients see a fixed text, the log has the cause

Messages name the thing that is wrong and the remedy. Each protocol maps ``Code`` to its own status in one table.
"""

from __future__ import annotations

import errno
from enum import Enum


class Code(Enum):
    """What went wrong, in terms that no protocol owns."""

    INVALID_ARGUMENT = "invalid_argument"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    UNAUTHENTICATED = "unauthenticated"
    STORAGE_FULL = "storage_full"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INTERNAL = "internal"


class IngotError(Exception):
    """Base of all deliberate errors; ``str(error)`` is fit to be shown to a user."""

    code = Code.INTERNAL


class InvalidArgument(IngotError):
    """The caller's input is wrong."""

    code = Code.INVALID_ARGUMENT


class InvalidArchive(InvalidArgument):
    """A file is not an Ingot archive, or is damaged."""


class Untrusted(InvalidArgument):
    """No signature that is accepted vouches for an archive, and the trust policy asks for one."""


class ExportError(InvalidArgument):
    """A model cannot be captured or lowered.

    ``detail`` shows, over several lines, the user's code that is to blame and an edit of it; it may be empty.
    """

    def __init__(self, message: str, detail: str = ""):
        super().__init__(message)
        self.detail = detail


class RejectedInputs(ExportError):
    """A model does not run on some inputs; ``reason`` is its own message, without the shapes of the inputs."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


class ParityError(ExportError):
    """An exported graph gives other numbers than the model it came from."""


class QuantizationError(InvalidArgument):
    """A model cannot be quantized, or its answers become useless."""


class TooLarge(InvalidArgument):
    """A request is larger than the configured limit."""

    code = Code.TOO_LARGE


class NotFound(IngotError):
    """No such model, version, reference or file."""

    code = Code.NOT_FOUND


class AlreadyExists(IngotError):
    """A name that cannot be overwritten is taken."""

    code = Code.ALREADY_EXISTS


class TagMoved(AlreadyExists):
    """A tag points to something else than the caller expected, and was left alone."""


class PermissionDenied(IngotError):
    """A registry or storage service refuses access."""

    code = Code.PERMISSION_DENIED


class Unauthenticated(PermissionDenied):
    """A registry or storage service asks for credentials, or does not accept those that were sent."""

    code = Code.UNAUTHENTICATED


class StorageFull(IngotError):
    """The disk that is written to, or the user's quota on it, is full."""

    code = Code.STORAGE_FULL


class Unsupported(IngotError):
    """The request is understood, but nothing here can do it."""

    code = Code.UNSUPPORTED


class Unavailable(IngotError):
    """The model cannot answer now: it is loading, draining or overloaded."""

    code = Code.UNAVAILABLE


class Transient(Unavailable):
    """A failure that may pass: a dropped connection, a registry's own error, too many requests.

    ``after`` is how many seconds the registry asks to wait.
    """

    def __init__(self, message: str, after: float = 0.0):
        super().__init__(message)
        self.after = after


class DeadlineExceeded(IngotError):
    """The request's timeout passed before its answer was ready."""

    code = Code.DEADLINE_EXCEEDED


class InternalError(IngotError):
    """A fault of ours; the cause is in the log, never in the answer."""


CLASSES: dict[Code, type[IngotError]] = {
    Code.INVALID_ARGUMENT: InvalidArgument,
    Code.TOO_LARGE: TooLarge,
    Code.NOT_FOUND: NotFound,
    Code.ALREADY_EXISTS: AlreadyExists,
    Code.PERMISSION_DENIED: PermissionDenied,
    Code.UNAUTHENTICATED: Unauthenticated,
    Code.STORAGE_FULL: StorageFull,
    Code.UNSUPPORTED: Unsupported,
    Code.UNAVAILABLE: Unavailable,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.INTERNAL: InternalError,
}
"""The class that stands for each code where an error came from another process."""

_MAX_TEXT = 1000


def public_text(error: IngotError) -> str:
    """Return what a client may see of an error: of an internal one, only that there was one."""
    if error.code is Code.INTERNAL:
        return "internal error; the server's log has the cause"
    text = str(error)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."  # it may quote a name of megabytes


def write_error(message: str, error: OSError, remedy: str = "") -> InvalidArgument | StorageFull:
    """Return the error for a file or folder that cannot be written: ``message``, the system's reason, ``remedy``."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (StorageFull if full else InvalidArgument)(f"{message}: {error.strerror or error}{remedy}")


def missing_package(package: str, purpose: str, extra: str | None) -> Unsupported:
    """Return the error for an optional dependency that is not installed; ``extra`` None is a package of its own."""
    install = package if extra is None else f"'ingot-serve[{extra}]'"
    return Unsupported(f"{purpose} needs the package '{package}', which is not installed: pip install {install}")
