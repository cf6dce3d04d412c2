from __future__ import annotations

import pytest

from ingot.cli.output import duration, say, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
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
