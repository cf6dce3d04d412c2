"""Columns of the bar that shows a transfer: the same units as in all that is printed. Imported where a bar is shown."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

from ingot.report.units import size


class Amount(ProgressColumn):
    """How many bytes were moved, of how many."""

    def render(self, task: Task) -> Text:
        total = "?" if task.total is None else size(int(task.total))
        return Text(f"{size(int(task.completed))} of {total}", style="progress.download")


class Rate(ProgressColumn):
    """Bytes a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{size(int(speed))}/s", style="progress.data.speed")
