"""Where a setting's value was given: an option, a variable, or a configuration file; and unknown variables."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ingot.config.setting import Setting
from ingot.errors import InvalidArgument

# Variables read in addition to the settings: store, configuration file, secrets, other commands, tests.
OTHER_VARIABLES = (
    "INGOT_HOME",
    "INGOT_CONFIG",
    "INGOT_API_KEY",
    "INGOT_KEY_PASSWORD",
    "INGOT_MANAGEMENT_URL",
    "INGOT_REDIRECT_HOSTS",
    "INGOT_TOKEN_HOSTS",
    "INGOT_TRACEBACK",
    "INGOT_PURE",
    "INGOT_REQUIRE_TOOLS",
)
# What Kubernetes puts into every container where a service is called "ingot" or "ingot-...", but for settings' names.
_SERVICE = re.compile(r"INGOT_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
# Characters of a misspelt name that are compared: a client's name may have a million, and difflib indexes each.
_LONGEST = 100
_SERVICE_PORT = re.compile(r"INGOT_(\w+_)?PORT")


class Given(NamedTuple):
    """A value that the user gave.

    Attributes:
        value: as it was given.
        called: the setting as the user wrote it, for messages.
        place: the file and line; empty for options and variables.
    """

    value: Any
    called: str
    place: str = ""

    @property
    def origin(self) -> str:
        """Where it was given: ``--max-batch``, ``INGOT_MAX_BATCH`` or ``ingot.toml:3``."""
        return self.place or self.called


def given(
    known: Mapping[str, Setting], settings: Mapping[str, Any], options: bool, file: Mapping[str, Given]
) -> dict[str, Given]:
    """Return the values that were given, by the setting's name: options first, then variables, then the file.

    Args:
        known: all settings.
        settings: values by name; of options of the command if ``options``, otherwise of a Python program.
        options: see ``settings``.
        file: values of the configuration file.

    Raises:
        InvalidArgument: there is an unknown setting, or an unknown environment variable.
    """
    _check_variables(known)
    for name in settings:
        if name not in known:
            near = nearest(name, known)
            remedy = f"did you mean {near}?" if near else "docs/reference/settings.md lists them"
            raise InvalidArgument(f"there is no setting '{name}'; {remedy}")
    found = dict(file)
    for name, setting in known.items():
        if name in settings:
            found[name] = Given(settings[name], setting.option if options else name)
        elif not setting.file_only and (text := os.environ.get(setting.variable)) is not None:
            found[name] = Given(text, setting.variable)
    return found


def nearest(name: str, names: Collection[str]) -> str:
    """Return the name most like a misspelt one; empty if none is."""
    return next(iter(difflib.get_close_matches(name[:_LONGEST], names, 1)), "")


def _check_variables(known: Mapping[str, Setting]) -> None:
    """Refuse a variable that nothing reads, since a misspelt setting would be ignored.

    Raises:
        InvalidArgument: names it, and the one that is most like it.
    """
    settings = [setting.variable for setting in known.values() if not setting.file_only]
    file_only = {setting.variable: setting.name for setting in known.values() if setting.file_only}
    for name in sorted(os.environ):
        if not name.startswith("INGOT_") or name in settings or name in OTHER_VARIABLES or _of_kubernetes(name):
            continue
        if name in file_only:
            raise InvalidArgument(f"{name} has no effect: set {file_only[name]} in the configuration file")
        others = [other.removeprefix("INGOT_") for other in (*settings, *OTHER_VARIABLES)]
        near = nearest(name.removeprefix("INGOT_"), others)
        remedy = f"did you mean INGOT_{near}?" if near else "docs/reference/settings.md lists them"
        raise InvalidArgument(f"unknown environment variable {name}; {remedy}")


def _of_kubernetes(name: str) -> bool:
    """Return whether Kubernetes set a variable. The name alone is not enough for a port: it may be misspelt."""
    if _SERVICE.fullmatch(name):
        return True
    host = f"{name.removesuffix('PORT')}SERVICE_HOST"
    return bool(_SERVICE_PORT.fullmatch(name)) and ("://" in os.environ[name] or host in os.environ)
