"""Write what the settings of ``ServerConfig`` generate: a table, a JSON Schema, and the keywords of ``ingot.serve``.

``python scripts/settings_table.py`` writes the table into docs/reference/settings.md, ingot.schema.json next to it and
ingot/config/keywords.py; a test checks that they are current.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ingot.config import ServerConfig
from ingot.config.file import schema
from ingot.config.setting import Setting

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "settings.md"
KEYWORDS = Path(__file__).parent.parent / "ingot" / "config" / "keywords.py"
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
    own = "[Per model](../guides/serve/configuration.md#keys)." if setting.per_model else ""
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


def keywords() -> str:
    """Return the module with the type of the settings as keyword arguments."""
    fields = "".join(
        f'    {setting.name}: {_annotation(setting)}\n    """{setting.help}."""\n'
        for setting in ServerConfig.settings().values()
    )
    return f'''"""The settings as keyword arguments of :func:`ingot.serve`.

Written by scripts/settings_table.py from the fields of ServerConfig; do not edit.
"""

# ruff: noqa: E501
from __future__ import annotations

import os
from typing import Literal, TypedDict


class ServerSettings(TypedDict, total=False):
    """Durations are seconds, or texts with a unit, such as ``50ms``. docs/reference/settings.md has the limits.

    Examples:
        >>> settings: ingot.ServerSettings = {{"http_port": 0, "grpc_port": 0, "max_batch": 32}}
        >>> with ingot.serve("./net.ingot", **settings) as server:
        ...     server.models
        ['net']
    """

{fields}'''


def _annotation(setting: Setting) -> str:
    kind = setting.kind.__name__
    if setting.choices:
        kind = f"Literal[{', '.join(map(json.dumps, setting.choices))}]"
    elif setting.kind is Path:
        kind = "str | os.PathLike[str]"
    elif setting.duration:
        kind = "float | str"
    return f"{kind} | None" if setting.default is None or setting.off else kind


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    SCHEMA.write_text(schema_text())
    KEYWORDS.write_text(keywords())
