"""Rules of trust policies, and the TOML file that holds them. docs/guides/deploy/registry.md describes the format."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.errors import InvalidArgument, NotFound
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import Reference, RegistryAddress
from ingot.model_store.trust import cosign, oms, signing
from ingot.model_store.trust.keys import PublicKey, read_file
from ingot.model_store.trust.signing import Finding, Result

MAX_POLICY_BYTES = 1 << 20
MAX_RULES = 1000
MAX_KEYS = 64
Format = Literal["ingot", "oms", "cosign"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
"""Signatures that a rule can accept.

Ingot's own, bundles of OpenSSF Model Signing next to archive files, and cosign's, which are attached like Ingot's.
"""
_NAMES = re.compile(r"[A-Za-z0-9._*?-]+(?:/[A-Za-z0-9._*?-]+)*")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", strict=True)


class _RuleTable(_Table):
    names: str = Field(max_length=1000)
    registry: str | None = None
    keys: tuple[str, ...] = Field((), max_length=MAX_KEYS, strict=False)
    formats: tuple[Format, ...] = Field(("ingot",), min_length=1, max_length=len(FORMATS), strict=False)
    allow_code: bool = False
    require_signature: bool = True


class _PolicyTable(_Table):
    require_signature: bool = True
    rule: tuple[_RuleTable, ...] = Field((), max_length=MAX_RULES, strict=False)


@dataclass(frozen=True)
class Rule:
    """The accepted signers of the models that match a pattern.

    Args:
        label: its name in messages; empty if it is not from a file.
        names: pattern of model names.
        registry: host and port of the registry that it is restricted to; None: anywhere, including store and files.
        keys: the accepted keys, by key id.
        titles: the policy's names of the keys, by key id.
        formats: the accepted formats of signatures.
        allow_code: whether a valid signature permits variants of formats that can run code.
        require_signature: whether models without an accepted signature are refused.
        title: the policy's text of name pattern and registry.
    """

    label: str
    names: re.Pattern[str]
    _: KW_ONLY
    registry: tuple[str, int] | None = None
    keys: Mapping[str, PublicKey] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    formats: Sequence[Format] = ("ingot",)
    allow_code: bool = False
    require_signature: bool = True
    title: str = ""

    def covers(self, reference: Reference) -> bool:
        registry = _endpoint(reference.registry) if reference.registry else None
        return self.registry in (None, registry) and self.names.fullmatch(reference.name) is not None

    def find(self, archive: Archive, name: str, bundle: Path | None = None) -> Finding:
        """Look for an accepted signature of an archive under a name, in the accepted formats.

        Args:
            archive: with its attachments.
            name: the name by which it was found.
            bundle: the bundle of an archive file, if it is not next to it.
        """
        found = []
        for kind in self.formats:
            if kind == "oms":
                found.append(oms.check(archive, name, self.keys, bundle))
            elif kind == "cosign":
                found.append(cosign.check(archive, name, self.keys))
            else:
                found.append(signing.check(archive, name, self.keys))
            if found[-1].result == "valid":
                return found[-1]
        results = {each.result for each in found}
        worst: Result = "invalid" if "invalid" in results else "untrusted" if "untrusted" in results else "unsigned"
        return Finding(worst, faults=tuple(fault for each in found for fault in each.faults))

    def accepted(self) -> str:
        """Return the keys for messages."""
        return ", ".join(f"{keyid[:16]}... ({title})" for keyid, title in self.titles.items()) or "none"


def load(path: Path) -> tuple[list[Rule], bool]:
    """Return the rules of a policy file, and whether models without a rule are refused.

    Raises:
        NotFound: there is no such file, or a key file is missing.
        InvalidArgument: a file is invalid, or every user can write it; the message names it.
    """
    content = read_file(path, trusted=True, limit=MAX_POLICY_BYTES)
    try:
        table = _PolicyTable.model_validate(tomllib.loads(content.decode()))
    except ValidationError as error:
        raise InvalidArgument(f"{path} {_fault(error)}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not valid TOML: {error}") from error
    return [_rule(item, number, path) for number, item in enumerate(table.rule, 1)], table.require_signature


def _rule(table: _RuleTable, number: int, path: Path) -> Rule:
    label = f"rule {number} (names = {table.names!r})"
    where = f"{path}, {label}"
    if _NAMES.fullmatch(table.names) is None:
        raise InvalidArgument(
            f"{where}: that is not a pattern of model names; write names with *, ? and, for any number of parts, **"
        )
    if not table.keys and (table.require_signature or table.allow_code):
        need = "a signature is required" if table.require_signature else "allow_code applies to signed models only"
        raise InvalidArgument(f"{where}: {need}, and no keys are accepted; add keys = ['team.pub']")
    keys: dict[str, PublicKey] = {}
    titles: dict[str, str] = {}
    for position, text in enumerate(table.keys, 1):
        key, title = _key(text, position, path, where)
        keys[key.keyid], titles[key.keyid] = key, title
    registry = _registry(table.registry, where) if table.registry is not None else None
    title = table.names if table.registry is None else f"{table.names} of {table.registry}"
    return Rule(
        label,
        name_pattern(table.names.lower()),
        registry=registry,
        keys=keys,
        titles=titles,
        formats=table.formats,
        allow_code=table.allow_code,
        require_signature=table.require_signature,
        title=title,
    )


def _key(text: str, position: int, path: Path, where: str) -> tuple[PublicKey, str]:
    if "-----BEGIN" in text:
        return PublicKey.parse(text.encode(), f"{where}: key {position}"), f"key {position}"
    file = path.parent / Path(text).expanduser()
    try:
        return PublicKey.parse(read_file(file, trusted=True), str(file)), text
    except NotFound as error:
        raise NotFound(f"{where}: {error}; keys are files relative to the policy, or PEM text") from error


def name_pattern(names: str) -> re.Pattern[str]:
    """Return a pattern that matches names by component: ``*`` and ``?`` within one, ``**`` for one or more."""
    parts = []
    for part in names.split("/"):
        inside = "".join({"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char)) for char in part)
        parts.append("[^/]+(?:/[^/]+)*" if part == "**" else inside)
    return re.compile("/".join(parts))


def _registry(text: str, where: str) -> tuple[str, int]:
    try:
        return _endpoint(RegistryAddress.parse(text if "://" in text else f"oci://{text}"))
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from error


def _endpoint(address: RegistryAddress) -> tuple[str, int]:
    return address.host, address.port or (443 if address.url.startswith("https:") else 80)


def _fault(error: ValidationError) -> str:
    """Describe the first fault of a policy in terms of the file."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    loc = first["loc"]
    inside = len(loc) > 2 and loc[0] == "rule"
    where = f"rule {loc[1] + 1}: " if inside else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join((_RuleTable if inside else _PolicyTable).model_fields)
        return f"is not valid: {where}there is no field '{loc[-1]}'; there are: {known}"
    path = ".".join(str(part) for part in (loc[2:] if inside else loc))
    return f"is not valid: {where}{path!r}: {first['msg']}"
