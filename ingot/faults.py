"""The boundary of one request or change: its fault becomes an error and does not reach the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from ingot.errors import IngotError, InternalError
from ingot.faultlog import rate_limited_logger

P = ParamSpec("P")
T = TypeVar("T")

log = rate_limited_logger(__name__)


def public_error(error: Exception, failure: str) -> IngotError:
    """Return the error to answer a request with: a deliberate one as it is, any other logged, as an internal one.

    Args:
        error: what was raised.
        failure: what failed, as a clause for the log.
    """
    if isinstance(error, IngotError):
        return error
    log.error("%s", failure, exc_info=error)
    return InternalError(f"{failure}: {type(error).__name__}: {error}")


def attempt(failure: str, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | IngotError:
    """Run a step of one request, and return its result, or :func:`public_error` of what it raises."""
    try:
        return step(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the boundary of one request: its fault must not reach the others
        return public_error(error, failure)


async def attempt_async(failure: str, step: Awaitable[T]) -> T | IngotError:
    """Do the same as :func:`attempt`, with a coroutine."""
    try:
        return await step
    except Exception as error:  # noqa: BLE001 - the boundary of one request: its fault must not reach the others
        return public_error(error, failure)
