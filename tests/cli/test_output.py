from __future__ import annotations

import io
import signal
import threading

import pytest
from rich.console import Console

from ingot.cli import interrupts
from ingot.cli.output import duration, progress, say, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (1020 << 10, "1020 KiB"), (5 << 40, "5 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0000123, "12 us"), (0.0123, "12.30 ms"), (2.5, "2500.00 ms")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_result_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]x[/] " * 40
    say(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_timed_steps_stay_with_the_time_that_each_took(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("ingot.cli.output.stderr", lambda: terminal)
    with progress("Importing", timed=True) as step:
        step("Capturing [/x]")
    assert isinstance(terminal.file, io.StringIO)
    last = terminal.file.getvalue().rpartition("Importing")
    assert "0:00:00" in last[0]
    assert "0:00:00" in last[2]
    assert "Capturing [/x]" in last[2]


@pytest.mark.parametrize("timed", [True, False])
def test_ctrl_c_is_printed_above_the_progress(monkeypatch: pytest.MonkeyPatch, timed: bool) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("ingot.cli.output.stderr", lambda: terminal)
    for name, value in (("_said", threading.Lock()), ("_seen", []), ("_handled", [])):
        monkeypatch.setattr(interrupts, name, value)
    animations: list[int] = []

    def interrupt() -> None:
        try:
            interrupts._interrupt(signal.SIGINT, None)
        finally:  # the animation has ended, though the work has not
            animations.append(len(terminal._live_stack))

    with pytest.raises(KeyboardInterrupt), progress("Capturing", timed=timed):
        interrupt()
    assert animations == [0]
    assert isinstance(terminal.file, io.StringIO)
    assert "interrupted\n" in terminal.file.getvalue()


def test_a_step_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr("ingot.cli.output.stderr", lambda: terminal)
    with progress("Opening [/x]") as step:
        step("Trying [bold]a[/] \x1b[31m")
        terminal.print("")
    assert isinstance(terminal.file, io.StringIO)
    shown = terminal.file.getvalue()
    assert "Trying [bold]a[/] \\x1b[31m" in shown
