"""Every error that Ingot raises on purpose, with a transport-neutral code.

    IngotError
    ├── InvalidArgument      the caller's input is wrong (bad tensor, bad reference, bad option)
    │   ├── InvalidConfig    a configuration file has faults
    │   ├── InvalidField     a field of a JSON body is wrong
    │   ├── InvalidArchive   a file is not an archive, or is damaged
    │   ├── Untrusted        an archive lacks a signature that the trust policy requires
    │   ├── ExportError      the model cannot be captured or lowered
    │   │   ├── ParityError  the exported graph computes other numbers than the model
    │   │   └── RejectedInputs  the model does not run on some inputs
    │   ├── QuantizationError  the model cannot be quantized, or its outputs become useless
    │   └── TooLarge         the request, or the answer, is larger than the limit
    ├── NotFound             no such model, version, reference or file
    │   ├── ModelNotFound    no such model
    │   └── VersionNotFound  the model has no such version
    ├── PermissionDenied     a registry or storage service refuses access
    │   ├── DefaultVersionKept  the default version of a model is not removed while there are others
    │   └── Unauthenticated  it asks for credentials, or does not accept those that were sent
    ├── AlreadyExists        an immutable name is taken
    │   └── TagMoved         a tag points to another archive than expected
    ├── StorageFull          the disk or its quota is full
    ├── Unsupported          not implemented by this server or build
    ├── Unavailable          not now: loading, draining or overloaded; try again later
    │   ├── Transient        a registry or the network failed, also when retried
    │   ├── Unreached        no connection to the server could be made, so nothing was sent
    │   └── EngineLost       the process that ran the model ended during the request
    ├── TooManyRequests      the client exceeds its own limit of requests; try again later
    ├── DeadlineExceeded     the request's timeout, or the server's slo, passed before an answer was ready
    │   └── EngineTimeout    the engine call was ended, because of its limit or because no client waited for it
    └── InternalError        a fault of Ingot; clients see a fixed text, the log has the cause
        └── ModelFailed      a fault of a model's own code; clients see its message, the log has the place
            ├── HandlerFailed  that of a handler of TorchServe, with the status of its answer
            └── SamplesFailed  some samples of a batch failed, the others were answered

Messages name the faulty item and the remedy. Each protocol maps ``Code`` to its status in one table,
``STATUS`` in ``protocol/json_codec.py`` and ``protocol/proto_codec.py``.
"""

from __future__ import annotations

import errno
import reprlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Self


class Code(StrEnum):
    """Error codes that are independent of any protocol. They are texts, which are hashed faster than other members."""

    INVALID_ARGUMENT = "invalid_argument"
    TOO_LARGE = "too_large"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    UNAUTHENTICATED = "unauthenticated"
    STORAGE_FULL = "storage_full"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    TOO_MANY_REQUESTS = "too_many_requests"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INTERNAL = "internal"


class IngotError(Exception):
    """Base of all deliberate errors; ``str(error)`` is fit to show to a user.

    ``retry_after`` is set by clients, if the server may answer the same request later: in so many seconds. ``plain`` is
    set if this error names files for the user of this machine: it is the error that it adds them to.
    """

    code = Code.INTERNAL
    retry_after: float | None = None
    plain: IngotError | None = None

    def hinting(self, plain: IngotError) -> Self:
        """Set ``plain``, and return this error."""
        self.plain = plain
        return self

    @property
    def unhinted(self) -> IngotError:
        """The error without names of files, for clients over the network."""
        return self if self.plain is None else self.plain.unhinted


class InvalidArgument(IngotError):
    """The caller's input is wrong."""

    code = Code.INVALID_ARGUMENT


class InvalidConfig(InvalidArgument):
    """A configuration file has faults. ``problems`` lists all, each with its line; the message has the first."""

    def __init__(self, problems: Sequence[str]):
        more = f" (and {len(problems) - 1} more; ingot config check lists them)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")
        self.problems = problems


class InvalidField(InvalidArgument):
    """A field of a JSON body is wrong; ``field`` is its name."""

    def __init__(self, field: str, message: str):
        super().__init__(f"'{shortened(field)}' {message}")
        self.field = shortened(field)


class InvalidArchive(InvalidArgument):
    """A file is not an Ingot archive, or is damaged."""


class Untrusted(InvalidArgument):
    """An archive has no accepted signature, and the trust policy requires one."""


class ExportError(InvalidArgument):
    """A model cannot be captured or lowered.

    ``detail`` shows, over several lines, the cause, the user's code and how to edit it; it may be empty. ``headline``
    is the part of the message that ``detail`` does not repeat.
    """

    def __init__(self, message: str, detail: str = "", headline: str = ""):
        super().__init__(message)
        self.detail = detail
        self.headline = headline

    @property
    def text(self) -> str:
        """The message with the detail, over several lines; each fact once."""
        if not self.detail:
            return str(self)
        return f"{self.headline}: {self.detail}" if self.headline else f"{self}\n\n{self.detail}"


class RejectedInputs(ExportError):
    """A model does not run on some inputs; ``reason`` is its own message, without the shapes of the inputs."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


class ParityError(ExportError):
    """An exported graph computes other numbers than its original model."""


class QuantizationError(InvalidArgument):
    """A model cannot be quantized, or its outputs become useless."""


class TooLarge(InvalidArgument):
    """A request, or a server's answer, is larger than the configured limit."""

    code = Code.TOO_LARGE


class NotFound(IngotError):
    """No such model, version, reference or file."""

    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """A server or a store has no such model; a store has none under the tag either."""


class VersionNotFound(NotFound):
    """A server has the model, but not this version of it."""


class AlreadyExists(IngotError):
    """A name that cannot be overwritten is taken."""

    code = Code.ALREADY_EXISTS


class TagMoved(AlreadyExists):
    """A tag points to another archive than the caller expected, and was not changed."""


class PermissionDenied(IngotError):
    """A server, a registry or a storage service refuses access."""

    code = Code.PERMISSION_DENIED


class DefaultVersionKept(PermissionDenied):
    """The default version of a model is not removed while there are others."""


class Unauthenticated(PermissionDenied):
    """A server, a registry or a storage service asks for credentials, or does not accept those that were sent."""

    code = Code.UNAUTHENTICATED


class StorageFull(IngotError):
    """The disk that is written to, or the user's quota on it, is full."""

    code = Code.STORAGE_FULL


class Unsupported(IngotError):
    """The request is understood, but this server or build does not implement it."""

    code = Code.UNSUPPORTED


class Unavailable(IngotError):
    """The model cannot answer now: it is loading, draining or overloaded."""

    code = Code.UNAVAILABLE


class TooManyRequests(IngotError):
    """The client exceeds its own limit of requests in flight, or of requests per second."""

    code = Code.TOO_MANY_REQUESTS


class Transient(Unavailable):
    """A failure that may pass: a broken connection, an internal error of a registry, too many requests.

    ``after`` is how many seconds the registry asks to wait.
    """

    def __init__(self, message: str, after: float = 0.0):
        super().__init__(message)
        self.after = after


class Unreached(Unavailable):
    """No connection to a server could be made, so nothing was sent."""

    retry_after = 0.0


class EngineLost(Unavailable):
    """The engine process that ran the request ended; the request is not tried again, as it may be the cause."""


class DeadlineExceeded(IngotError):
    """The request's timeout passed before its answer was ready."""

    code = Code.DEADLINE_EXCEEDED


class EngineTimeout(DeadlineExceeded):
    """An engine call was ended: it exceeded its limit, or no client waited for it any longer.

    All requests of its batch fail, since it is not known which of them was slow.
    """


class InternalError(IngotError):
    """A fault of Ingot; the cause is in the log, never in the answer."""


class ModelFailed(InternalError):
    """The code of a model in Python failed; clients see the message, which is the model's own."""


class HandlerFailed(ModelFailed):
    """A handler of TorchServe failed; ``status`` is that of the answer on TorchServe's ports, at least 400."""

    def __init__(self, message: str, status: int = 503):
        super().__init__(message)
        self.status = status if 400 <= status <= 599 else 500
        self.code = Code.INVALID_ARGUMENT if self.status < 500 else Code.INTERNAL


class SamplesFailed(ModelFailed):
    """Some samples of a batch failed, and the others were answered.

    ``outputs`` are those of the whole batch, with arbitrary values for the samples that failed, and ``errors`` are the
    errors of these by their indices.
    """

    def __init__(self, outputs: Mapping[str, Any], errors: Mapping[int, IngotError]):
        at, error = next(iter(errors.items()))
        super().__init__(f"sample {at}: {error}")
        self.outputs = outputs
        self.errors = errors

    def within(self, start: int, stop: int) -> IngotError | None:
        """Return the error of the first failed sample of a range; None if there is none."""
        return next((error for at, error in self.errors.items() if start <= at < stop), None)


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
    Code.TOO_MANY_REQUESTS: TooManyRequests,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.INTERNAL: InternalError,
}
"""The class for each code of an error from another process."""

ALLOW_CODE = "if you trust its source, allow it with --allow-code (INGOT_ALLOW_CODE=1, or allow_code=True)"
"""The remedy in messages about code that runs only with the user's consent."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of an ``OSError`` for a full disk, or a quota that is used up."""

_MAX_TEXT = 1000
_INTERNAL = Code.INTERNAL  # Python 3.11 looks members up by a function, and there may be many refusals
_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxother = _MAX_TEXT


def public_text(error: IngotError) -> str:
    """Return the text of an error for clients, which hides the details of internal errors."""
    if error.code is _INTERNAL and not isinstance(error, ModelFailed):
        return "internal error; the server's log has the cause"
    return shortened(str(error))


def shortened(text: str) -> str:
    """Return at most 1000 characters of a text, which may quote a very long name."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def quoted(value: object) -> str:
    """Return a value of a client for a message, as ``repr`` does, but in part if it is long or deeply nested.

    ``repr`` itself fails on values that are nested as deeply as the parser of JSON allows.
    """
    return _QUOTES.repr(value)


def write_error(message: str, error: OSError, remedy: str = "") -> InvalidArgument | StorageFull:
    """Return the error for a file or folder that cannot be written: ``message``, the system's reason, ``remedy``."""
    return (StorageFull if error.errno in FULL_DISK else InvalidArgument)(
        f"{message}: {error.strerror or error}{remedy}"
    )


def missing_package(package: str, purpose: str, extra: str | None) -> Unsupported:
    """Return the error for an optional dependency that is not installed; ``extra`` None installs the package itself."""
    install = package if extra is None else f"'ingot-serve[{extra}]'"
    return Unsupported(f"{purpose} needs the package '{package}', which is not installed: pip install {install}")
