"""The option ``--load-timeout``: a limit of time on loading and running an ONNX graph of unknown origin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from ingot.cli import interrupts
from ingot.errors import InvalidArgument
from ingot.report import units

LoadTimeout = Annotated[
    str,
    typer.Option(metavar="<time>", help="How long an ONNX model may take to load and to answer; 0 is without a limit."),
]


def load_limit(text: str) -> float:
    """Return the seconds of ``--load-timeout``.

    Raises:
        InvalidArgument: it is not a duration.
    """
    if (seconds := units.seconds(text)) is None:
        raise InvalidArgument(f"--load-timeout is '{text}': write it as {units.TIMES}")
    return seconds


@contextlib.contextmanager
def limited_load(
    seconds: float, source: str, step: Callable[[str], None], stages: int = 1
) -> Iterator[Callable[[str], None]]:
    """Yield ``step`` with a limit of time on the first stages, in which an engine loads and runs a foreign graph.

    Args:
        seconds: after which the command ends; 0 is without a limit.
        source: what is loaded, for the message.
        step: called with the name of each stage that begins.
        stages: how many are limited together.
    """
    message = (
        f"{source} did not load and answer within {units.written(seconds)}. If the model is only large, raise "
        "--load-timeout (0 is without a limit). A graph with a loop or with functions inside functions may never end"
    )
    with contextlib.ExitStack() as loading:
        begun = 0

        def told(text: str) -> None:
            nonlocal begun
            step(text)
            if begun == 0:
                loading.enter_context(interrupts.limited(seconds, message))
            elif begun == stages:
                loading.close()
            begun += 1

        yield told
