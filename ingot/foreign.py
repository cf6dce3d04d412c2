"""The boundary to code that raises errors of any type: PyTorch, onnx_ir, ONNX Runtime, and the user's modules."""

from __future__ import annotations

import contextlib
import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ingot.errors import FULL_DISK, StorageFull

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class ExitRequested(Exception):
    """Stands for the ``SystemExit`` of foreign code, which is not an ``Exception`` and would end the command."""

    def __init__(self, error: SystemExit):
        super().__init__(
            f"the code ends the process (SystemExit: {error.code}); let it return, or raise another exception"
        )
        self.__traceback__ = error.__traceback__


class Panicked(Exception):
    """Stands for the panic of a package in Rust, such as ``tokenizers``: PyO3 raises it outside ``Exception``."""

    def __init__(self, error: BaseException):
        super().__init__(f"the package's code panicked: {error}")
        self.__traceback__ = error.__traceback__


class BaseRaised(Exception):
    """Stands for an exception of foreign code that is not an ``Exception``, such as ``asyncio.CancelledError``."""

    def __init__(self, error: BaseException):
        super().__init__(f"the code raised {type(error).__name__}, which is not an Exception")
        self.__traceback__ = error.__traceback__


def contained(error: BaseException, *, cancels: bool = False) -> Exception:
    """Return an error of foreign code as an ``Exception``.

    Args:
        error: of any type.
        cancels: whether ``CancelledError`` is from the code, which it is unless a coroutine waited.

    Raises:
        BaseException: the error itself, if it is not from the code: ``KeyboardInterrupt``, for one.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit):
        return ExitRequested(error)
    if type(error).__module__ == "pyo3_runtime":  # its PanicException cannot be imported
        return Panicked(error)
    ours = type(error).__module__.partition(".")[0] == "ingot"  # SIGTERM's, for one
    if ours or isinstance(error, KeyboardInterrupt | GeneratorExit):
        raise error
    if isinstance(error, CancelledError) and not cancels:
        raise error
    return BaseRaised(error)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on.

    Contexts that ``from None`` hides are included: httpcore hides the network's error so. Errors that are raised twice
    can cause each other.
    """
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and not any(following is each for each in seen):
        yield following
        seen.append(following)
        following = following.__cause__ or following.__context__


@contextlib.contextmanager
def reported_as(
    kind: type[Exception],
    message: str | Callable[[Exception], str],
    keep: type[Exception] | tuple[type[Exception], ...] = (),
    *,
    cancels: bool = False,
) -> Iterator[None]:
    """Raise any error of the block as ``kind``, and that of a full disk as ``StorageFull``.

    Args:
        kind: the type to raise.
        message: the new message, from the error, or as a text that the error's type and message are appended to.
        keep: the types of errors that pass as they are.
        cancels: as for :func:`contained`.
    """
    try:
        yield
    except keep:
        raise
    except BaseException as raised:  # such code raises errors of any type
        error = contained(raised, cancels=cancels)
        text = f"{message}: {typed(error)}" if isinstance(message, str) else message(error)
        full = isinstance(error, OSError) and error.errno in FULL_DISK
        raise (StorageFull if full else kind)(text) from raised


def outcome(function: Callable[[], _T]) -> _T | Exception:
    """Return the result of a function, or the error that it raises, for callers that continue without the result."""
    try:
        return function()
    except BaseException as error:  # noqa: BLE001 - such code raises errors of any type
        return contained(error, cancels=True)


def attempt(function: Callable[[], _T]) -> _T | None:
    """Return the result of a function, or None, with a debug message in the log, if it raises any error."""
    found = outcome(function)
    if isinstance(found, Exception):
        log.debug("an optional step failed", exc_info=found)
        return None
    return found


def typed(error: Exception) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def first_fault(error: Any) -> str:
    """Return the first fault that pydantic found: where it is, the value, and what it should be."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    # Without the alternatives of a union, such as literal['a', 'b'].
    place = ".".join(str(part) for part in first["loc"] if str(part).isalnum() or str(part).isidentifier())
    if first["type"].startswith("missing"):
        return f"'{place}' is missing"
    value = " ".join(repr(first["input"]).split())[:80]
    if first["type"] == "union_tag_not_found":
        return f"'{place}' is {value}, which has no {context['discriminator']}"
    message = str(context.get("error") or f"{first['msg'][:1].lower()}{first['msg'][1:]}")
    return f"'{place}' is {value}: {message}" if place else message


def text_of(error: Exception) -> str:
    """Return an error's message as text that can be encoded; code may raise errors whose ``__str__`` raises."""
    found = outcome(lambda: str(error))
    text = found if isinstance(found, str) else f"its message cannot be read ({type(found).__name__} in __str__)"
    return text.encode(errors="replace").decode()


def one_line(error: Exception, limit: int = 500) -> str:
    """Return an error's message without line breaks, at most ``limit`` characters of it."""
    return " ".join(text_of(error).split())[:limit]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return text_of(error).strip().split("\n", 1)[0] or type(error).__name__
