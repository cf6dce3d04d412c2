"""Trust policies: whose signatures are accepted for which models.

A policy is a TOML file. Only the first rule that matches a model applies. Models without a rule must be signed and so
are refused, unless the policy says otherwise. Unknown fields are errors, so that a typo does not disable a check. The
format is described in docs/registry.md.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ingot.errors import InvalidArgument, NotFound, Untrusted
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import Reference, RegistryAddress, stored_name, valid_name
from ingot.model_store.trust import signing
from ingot.model_store.trust.keys import PublicKey, read_file
from ingot.model_store.trust.signing import Finding, Result

MAX_POLICY_BYTES = 1 << 20
MAX_RULES = 1000
MAX_KEYS = 64
_SHOWN_RULES = 20
_NAMES = re.compile(r"[A-Za-z0-9._*?-]+(?:/[A-Za-z0-9._*?-]+)*")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", strict=True)


class _RuleTable(_Table):
    names: str = Field(max_length=1000)
    registry: str | None = None
    keys: tuple[str, ...] = Field((), max_length=MAX_KEYS, strict=False)
    allow_code: bool = False
    require_signature: bool = True


class _PolicyTable(_Table):
    require_signature: bool = True
    rule: tuple[_RuleTable, ...] = Field((), max_length=MAX_RULES, strict=False)


@dataclass(frozen=True)
class Verdict:
    """A policy's decision to accept an archive.

    ``signed_by`` is the id of the accepted key that signed it, at the time ``created``; None if no signature is
    required. ``result`` describes its signatures; ``rule`` is the rule that applied, empty if none matched.
    """

    result: Result
    rule: str
    _: KW_ONLY
    signed_by: str | None = None
    created: str | None = None
    allow_code: bool = False


@dataclass(frozen=True)
class Rule:
    """The accepted signers of the models that match a pattern.

    Args:
        label: its name in messages; empty if it is not from a file.
        names: pattern of model names.
        registry: host and port of the registry that it is restricted to; None: anywhere, including store and files.
        keys: the accepted keys, by key id.
        titles: the policy's names of the keys, by key id.
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
    allow_code: bool = False
    require_signature: bool = True
    title: str = ""

    def covers(self, reference: Reference) -> bool:
        registry = _endpoint(reference.registry) if reference.registry else None
        return self.registry in (None, registry) and self.names.fullmatch(reference.name) is not None

    def accepted(self) -> str:
        """Return the keys for messages."""
        return ", ".join(f"{keyid[:16]}... ({title})" for keyid, title in self.titles.items()) or "none"


class Policy:
    """A list of rules, of which the first match applies.

    Args:
        title: its name in messages.
        rules: in order.
        require_signature: whether models without a rule are refused.
    """

    def __init__(self, title: str, rules: Sequence[Rule], *, require_signature: bool = True):
        self.title = title
        self.rules = tuple(rules)
        self.require_signature = require_signature

    @classmethod
    def load(cls, path: Path) -> Policy:
        """Read a policy file and the key files that it names, relative to it.

        Raises:
            NotFound: there is no such file, or a key file is missing.
            InvalidArgument: a file is invalid, or every user can write it; the message names it.
        """
        path = path.expanduser()
        content = read_file(path, trusted=True, limit=MAX_POLICY_BYTES)
        try:
            table = _PolicyTable.model_validate(tomllib.loads(content.decode()))
        except ValidationError as error:
            raise InvalidArgument(f"{path} {_fault(error)}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} is not valid TOML: {error}") from error
        rules = [_rule(item, number, path) for number, item in enumerate(table.rule, 1)]
        return cls(path.name, rules, require_signature=table.require_signature)

    @classmethod
    def of_keys(cls, paths: Sequence[Path]) -> Policy:
        """Return a policy that requires a signature by one of some keys for everything.

        Raises:
            NotFound: a key file is missing.
            InvalidArgument: one is not a public key.
        """
        found = {str(path): PublicKey.parse(read_file(path.expanduser()), str(path)) for path in paths}
        titles = {key.keyid: title for title, key in found.items()}
        rule = Rule("", _pattern("**"), keys={key.keyid: key for key in found.values()}, titles=titles)
        return cls(" and ".join(found), [rule])

    def rule(self, reference: Reference) -> Rule:
        """Return the rule that applies to a model.

        Raises:
            InvalidArgument: its name is invalid, such as one with ``..`` in it.
        """
        valid_name(reference.name)
        default = Rule("", re.compile(""), require_signature=self.require_signature)
        return next((rule for rule in self.rules if rule.covers(reference)), default)

    def covers(self, reference: Reference) -> bool:
        """Return whether a rule matches a model."""
        return any(rule.covers(reference) for rule in self.rules)

    def check(self, archive: Archive, reference: Reference, *, file: str = "") -> Verdict:
        """Return the verdict on an archive under the name by which it was found. Blobs are not read.

        Args:
            archive: with its attachments.
            reference: its name, and the registry if it was found in one. For a file, ``Reference(archive.name)``.
            file: the file that it was found in, for messages.

        Raises:
            Untrusted: it is not trusted; the message has the findings, the accepted keys, and the remedy.
            InvalidArgument: the reference has an invalid name.
        """
        rule = self.rule(reference)
        finding = signing.check(archive, reference.name, rule.keys)
        if finding.result != "valid" and rule.require_signature:
            raise Untrusted(self._refusal(archive, reference, rule, finding, file))
        allow_code = rule.allow_code and finding.result == "valid"
        return Verdict(
            finding.result,
            rule.label,
            signed_by=finding.signed_by,
            created=finding.created,
            allow_code=allow_code,
        )

    def check_self_named(self, archive: Archive, name: str, *, file: str = "") -> Verdict:
        """Return the verdict on an archive file that is served under a name of the user's choice.

        A signature is for the archive's own name. If that name needs none, this proves nothing, since the file's author
        chose it: then the served name must need none either, or have a matching signature.

        Args:
            archive: with its attachments, from a file.
            name: the served name.
            file: the file, for messages.

        Raises:
            Untrusted: it is not trusted.
        """
        verdict = self.check(archive, Reference(archive.name), file=file)
        return verdict if verdict.result == "valid" else self.check(archive, Reference(stored_name(name)), file=file)

    def check_copy(self, archive: Archive, source: Reference, target: Reference | None, *, file: str = "") -> None:
        """Check that an archive may be copied: it must be trusted under its source and under its target.

        An archive from a registry or a file is checked under its name there. An archive that goes into the local store,
        or to a name with a rule, is checked under that name, so that copying cannot bypass a required
        signature. Any other archive is checked under its source name.

        Args:
            archive: with its attachments.
            source: its name where it was found; for a file, ``Reference(archive.name)``.
            target: its new name; None for a file.
            file: the file that it was found in.

        Raises:
            Untrusted: it is not trusted.
        """
        lands = target is not None and (target.registry is None or self.covers(target))
        if file or source.registry is not None or not lands:
            self.check(archive, source, file=file)
        if target is not None and lands:
            # Rules for a registry apply to its archives under any local name.
            becomes = Reference(target.name, registry=target.registry or source.registry)
            self.check(archive, becomes, file=file or str(replace(source, digest=None, variant=None)))

    def check_bare(self, name: str, path: Path) -> Verdict:
        """Return the verdict on a file that cannot carry a signature, under a name.

        Raises:
            Untrusted: it is not trusted.
        """
        rule = self.rule(Reference(stored_name(name)))
        if rule.require_signature:
            raise Untrusted(
                f"{path} is not trusted by {self._place(rule)}: a bare file carries no signature; make an archive of "
                "it (ingot export) and sign that, or add a rule with require_signature = false for the name "
                f"'{name}' to the policy"
            )
        return Verdict("unsigned", rule.label)

    def _refusal(self, archive: Archive, reference: Reference, rule: Rule, finding: Finding, file: str) -> str:
        shown = f"'{Reference(reference.name, reference.tag, archive.digest, registry=reference.registry)}'"
        if file:
            shown = f"{file} ({archive.digest[:19]}...), as '{reference.name}',"
        if not rule.keys:  # rules that require a signature have keys
            there = ", ".join(rule.title for rule in self.rules[:_SHOWN_RULES])
            more = f" and {len(self.rules) - _SHOWN_RULES} more" if len(self.rules) > _SHOWN_RULES else ""
            rules = f"the rules are for: {there}{more}" if there else "it has no rules"
            return f"{shown} is not trusted by {self._place(rule)}: no rule names '{reference.name}'; {rules}"
        found = "it is unsigned" if finding.result == "unsigned" else "; ".join(finding.faults[:4])
        return (
            f"{shown} is not trusted by {self._place(rule)}: {found}. Accepted keys: {rule.accepted()}. The "
            "holder of one of them can sign it: ingot sign"
        )

    def _place(self, rule: Rule) -> str:
        return f"{self.title}, {rule.label}" if rule.label else self.title


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
        _pattern(table.names.lower()),
        registry=registry,
        keys=keys,
        titles=titles,
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


def _pattern(names: str) -> re.Pattern[str]:
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
