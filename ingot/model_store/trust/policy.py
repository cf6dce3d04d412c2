"""Trust policies: whose signatures are accepted for which models.

A policy is a TOML file. Only the first rule that matches a model applies. Models without a rule must be signed and so
are refused, unless the policy says otherwise. Unknown fields are errors, so that a typo does not disable a check. The
format is described in docs/guides/deploy/registry.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from ingot.errors import Untrusted
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import Reference, stored_name, valid_name
from ingot.model_store.trust import rules
from ingot.model_store.trust.keys import PublicKey, read_file
from ingot.model_store.trust.rules import FORMATS, Rule, name_pattern
from ingot.model_store.trust.signing import Finding, Result

_SHOWN_RULES = 20


@dataclass(frozen=True)
class Verdict:
    """A policy's decision to accept an archive.

    ``signed_by`` is the id of the accepted key that signed it, at the time ``created`` if the format has one; None if
    no signature is required. ``format`` is the signature's. ``result`` describes its signatures; ``rule`` is the rule
    that applied, empty if none matched.
    """

    result: Result
    rule: str
    _: KW_ONLY
    signed_by: str | None = None
    created: str | None = None
    format: str = "ingot"
    allow_code: bool = False


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
        found, require_signature = rules.load(path)
        return cls(path.name, found, require_signature=require_signature)

    @classmethod
    def of_keys(cls, paths: Sequence[Path]) -> Policy:
        """Return a policy that requires a signature by one of some keys, in any format, for everything.

        Raises:
            NotFound: a key file is missing.
            InvalidArgument: one is not a public key.
        """
        found = {str(path): PublicKey.parse(read_file(path.expanduser()), str(path)) for path in paths}
        titles = {key.keyid: title for title, key in found.items()}
        rule = Rule(
            "", name_pattern("**"), keys={key.keyid: key for key in found.values()}, titles=titles, formats=FORMATS
        )
        return cls(" and ".join(found), [rule])

    def rule(self, reference: Reference) -> Rule:
        """Return the rule that applies to a model.

        Raises:
            InvalidArgument: the name is invalid: it contains ``..``, say.
        """
        valid_name(reference.name)
        default = Rule("", re.compile(""), require_signature=self.require_signature)
        return next((rule for rule in self.rules if rule.covers(reference)), default)

    def covers(self, reference: Reference) -> bool:
        """Return whether a rule matches a model."""
        return any(rule.covers(reference) for rule in self.rules)

    def check(self, archive: Archive, reference: Reference, *, file: str = "", bundle: Path | None = None) -> Verdict:
        """Return the verdict on an archive under the name by which it was found.

        Blobs are not read, but a file is if a bundle of OpenSSF Model Signing decides.

        Args:
            archive: with its attachments.
            reference: its name, and the registry if it was found in one. For a file, ``Reference(archive.name)``.
            file: the file that it was found in, for messages.
            bundle: its bundle of OpenSSF Model Signing; None for the file ``FILE.sig``.

        Raises:
            Untrusted: it is not trusted; the message has the findings, the accepted keys, and the remedy.
            InvalidArgument: the reference has an invalid name.
        """
        rule = self.rule(reference)
        finding = rule.find(archive, reference.name, bundle)
        if finding.result != "valid" and rule.require_signature:
            raise Untrusted(self._refusal(archive, reference, rule, finding, file))
        allow_code = rule.allow_code and finding.result == "valid"
        return Verdict(
            finding.result,
            rule.label,
            signed_by=finding.signed_by,
            created=finding.created,
            format=finding.format,
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
            f"{shown} is not trusted by {self._place(rule)}: {found}. Accepted keys: {rule.accepted()}; formats: "
            f"{', '.join(rule.formats)}. The holder of one of the keys can sign it: ingot trust sign"
        )

    def _place(self, rule: Rule) -> str:
        return f"{self.title}, {rule.label}" if rule.label else self.title
