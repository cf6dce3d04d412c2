"""Objects as YAML with comments. A comment is a key that begins with ``# ``, without a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ingot.errors import missing_package

# As PyYAML writes such a key: quoted, as an unquoted # would begin a comment.
_COMMENT = re.compile(r"^(\s*(?:- )?)(['\"])(# .*)\2: null$", re.MULTILINE)


def comment(*lines: str) -> dict[str, None]:
    """Return keys that become lines of a comment, above the key that follows them. At most 110 characters each."""
    return {f"# {line}": None for line in lines}


def plain(content: Any) -> Any:
    """Return an object without its comments, as Kubernetes reads it."""
    if isinstance(content, Mapping):
        return {key: plain(value) for key, value in content.items() if not key.startswith("# ")}
    return [plain(item) for item in content] if isinstance(content, (list, tuple)) else content


def to_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return objects as documents of YAML, in the order of their keys.

    Raises:
        Unsupported: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise missing_package("PyYAML", "writing manifests", "deploy") from error

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            return True  # readers do not expect them in manifests

    texts = (
        yaml.dump(dict(each), Dumper=Dumper, sort_keys=False, width=10_000, allow_unicode=True) for each in objects
    )
    return "---\n".join(_COMMENT.sub(_unquoted, text) for text in texts)


def _unquoted(match: re.Match[str]) -> str:
    return match[1] + match[3].replace("''", "'")
