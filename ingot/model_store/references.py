"""References: how people name archives in a store, ``name[:tag][@sha256:...][#variant]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ingot.errors import InvalidArgument

# OCI distribution's grammar for repository names and tags, so that every local name is also a legal remote one.
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_REFERENCE = re.compile(
    rf"(?P<name>{_NAME.pattern})"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
    r"(?:#(?P<variant>[A-Za-z0-9][A-Za-z0-9._-]*))?"
)
# A model 'a/index.json' would be a folder where model 'a' keeps its tags.
_RESERVED = frozenset(("oci-layout", "index.json", "reflog.jsonl", "blobs"))
_VERSION = re.compile(r"v?\d[\w.-]*")


@dataclass(frozen=True)
class Reference:
    """One parsed reference. A missing tag means the highest version; a missing variant, the archive's preferred one."""

    name: str
    tag: str | None = None
    digest: str | None = None
    variant: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse ``name[:tag][@sha256:...][#variant]``.

        Raises:
            InvalidArgument: ``text`` is not of that form.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise InvalidArgument(
                f"'{text}' is not a model reference; write name:tag such as digits:1 "
                "(lower-case letters, digits and - _ . /), or ./file.ingot for a file"
            )
        return cls(valid_name(match["name"]), match["tag"], match["digest"], match["variant"])

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        variant = f"#{self.variant}" if self.variant else ""
        return f"{self.name}{tag}{digest}{variant}"


def is_version(tag: str) -> bool:
    """Tell whether a tag is a version (a digit first, or v and a digit), which never moves once pushed.

    Any other tag is an alias.
    """
    return _VERSION.fullmatch(tag) is not None


def version_key(tag: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts version tags as people read them: 2 < 10, 1.9 < 1.10, 1.0-rc1 < 1.0.

    A part is (rank, number, text): numbers rank above words, and the end of a tag between them.
    """
    parts = [
        (2, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in re.findall(r"\d+|[A-Za-z]+", tag.removeprefix("v"))
    ]
    return (*parts, (1, 0, ""))


def valid_name(text: str) -> str:
    """Return ``text`` if it can name a model.

    Raises:
        InvalidArgument: it cannot; the message says which characters can stand in one.
    """
    if _NAME.fullmatch(text) is None:
        raise InvalidArgument(
            f"'{text}' cannot name a model; use lower-case letters and digits, with single - _ . / between them"
        )
    for component in text.split("/"):
        if component in _RESERVED:
            raise InvalidArgument(f"'{text}' cannot name a model: the store has a file of its own called '{component}'")
    return text


def name_from(text: str) -> str:
    """Return the model name nearest to an identifier or a file's stem: ``MyNet`` gives ``mynet``."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "model"
