"""What the docs have of the server's settings, generated from ``ServerConfig``: a table, and a JSON Schema.

``python scripts/settings_table.py`` writes the table into docs/settings.md, and docs/ingot.schema.json; a test checks
that both are current.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ingot.config import ServerConfig
from ingot.config.file import schema
from ingot.config.setting import Setting

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
SCHEMA = PAGE.with_name("ingot.schema.json")
_HEAD = "| setting, option, variable | default | takes | |\n|---|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(\|.*\n)*")


def table() -> str:
    """Return the table in Markdown."""
    return _HEAD + "".join(map(_row, ServerConfig.settings().values()))


def _row(setting: Setting) -> str:
    option = f"`{setting.option}`<br>`{setting.variable}`"
    if setting.default is True:
        option = f"`{setting.option}`<br>`--no-{setting.option.removeprefix('--')}`<br>`{setting.variable}`"
    elif setting.file_only:
        option = "in the file only"
    takes = setting.takes if not setting.duration else f"a time, {setting.takes}"
    own = "[Per model](configuration.md#keys)." if setting.per_model else ""
    text = " ".join(filter(None, (f"{setting.help}.", setting.more, own)))
    names = f"`{setting.name}`<br>{option}"
    cells = (names, setting.shown_default, takes, text)
    return f"| {' | '.join(cells)} |\n"


def updated(page: str) -> str:
    """Return a page with the table of today."""
    return _TABLE.sub(lambda _: table(), page, count=1)


def schema_text() -> str:
    """Return the schema as ``ingot config schema`` prints it."""
    return f"{json.dumps(schema(), indent=2)}\n"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    SCHEMA.write_text(schema_text())
