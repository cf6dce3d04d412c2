"""The table of the server's settings in docs/serving.md, generated from ``ServerConfig``.

``python scripts/settings_table.py`` writes it into the page; a test checks that it is current.
"""

from __future__ import annotations

import re
from pathlib import Path

from ingot.server.config import ServerConfig
from ingot.server.settings import Setting

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
_HEAD = "| setting | option | variable | default | takes | |\n|---|---|---|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(\|.*\n)*")


def table() -> str:
    """Return the table in Markdown."""
    return _HEAD + "".join(map(_row, ServerConfig.settings().values()))


def _row(setting: Setting) -> str:
    option = f"`{setting.option}`"
    if setting.default is True:
        option = f"{option}, `--no-{setting.option.removeprefix('--')}`"
    takes = setting.takes if not setting.duration else f"a time, {setting.takes}"
    text = " ".join(filter(None, (f"{setting.help}.", setting.more)))
    cells = (f"`{setting.name}`", option, f"`{setting.variable}`", setting.shown_default, takes, text)
    return f"| {' | '.join(cells)} |\n"


def updated(page: str) -> str:
    """Return a page with the table of today."""
    return _TABLE.sub(lambda _: table(), page, count=1)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
