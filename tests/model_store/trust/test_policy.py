from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.errors import InvalidArgument, NotFound, Untrusted
from ingot.model_store import Archive, Reference
from ingot.model_store.trust import signing
from ingot.model_store.trust.keys import PrivateKey
from ingot.model_store.trust.policy import Policy, Verdict
from tests.model_store.samples import archive
from tests.model_store.signers import KEY, OTHER

PLAIN = archive()
TEAM = '[[rule]]\nnames = "team/*"\nkeys = ["team.pub"]\n'

LoadPolicy = Callable[[str], Policy]


def signed(key: PrivateKey = KEY, name: str = "tiny") -> Archive:
    return PLAIN.with_signature(signing.sign(PLAIN, name, key))


@pytest.fixture
def load(tmp_path: Path) -> LoadPolicy:
    """Write a policy next to the keys team.pub and other.pub, and load it."""
    (tmp_path / "team.pub").write_bytes(KEY.public.pem)
    (tmp_path / "other.pub").write_bytes(OTHER.public.pem)

    def write(text: str) -> Policy:
        (tmp_path / "trust.toml").write_text(text)
        return Policy.load(tmp_path / "trust.toml")

    return write


def check(policy: Policy, reference: str, subject: Archive | None = None) -> Verdict:
    return policy.check(subject or signed(), Reference.parse(reference))


def refusal(policy: Policy, reference: str, subject: Archive | None = None) -> str:
    with pytest.raises(Untrusted) as caught:
        check(policy, reference, subject)
    return str(caught.value)


class TestCheck:
    def test_archives_signed_by_an_accepted_key_are_trusted(self, load: LoadPolicy) -> None:
        verdict = check(load(TEAM), "team/tiny:1")
        assert (verdict.result, verdict.signed_by, verdict.allow_code) == ("valid", KEY.public.keyid, False)
        assert verdict.rule == "rule 1 (names = 'team/*')"

    def test_the_refusal_of_an_unsigned_archive_names_accepted_keys(self, load: LoadPolicy) -> None:
        message = refusal(load(TEAM), "team/tiny:1", PLAIN)
        assert message == (
            f"'team/tiny:1@{PLAIN.digest}' is not trusted by trust.toml, rule 1 (names = 'team/*'): it is unsigned. "
            f"Accepted keys: {KEY.public.keyid[:16]}... (team.pub); formats: ingot. "
            "The holder of one of the keys can sign it: ingot trust sign"
        )

    def test_a_key_that_is_not_in_the_rule_is_refused(self, load: LoadPolicy) -> None:
        message = refusal(load(TEAM), "team/tiny:1", signed(OTHER))
        assert f"it is signed by {OTHER.public.keyid[:16]}..., whose key is not accepted" in message

    def test_a_key_that_was_taken_out_of_the_rule_does_not_count_any_more(self, load: LoadPolicy) -> None:
        check(load(TEAM), "team/tiny")
        assert "not accepted" in refusal(load(TEAM.replace("team.pub", "other.pub")), "team/tiny")

    def test_a_signature_for_another_name_is_refused(self, load: LoadPolicy) -> None:
        message = refusal(load(TEAM), "team/fraud:1")
        assert "it is signed for another name, 'tiny' and not 'fraud'" in message

    def test_a_signature_for_another_archive_is_refused(self, load: LoadPolicy) -> None:
        swapped = archive(b"evil").with_signature(signing.sign(PLAIN, "tiny", KEY))
        assert "it is signed for another archive" in refusal(load(TEAM), "team/tiny:1", swapped)

    def test_any_of_several_keys_will_do(self, load: LoadPolicy) -> None:
        policy = load(TEAM.replace('"team.pub"', '"team.pub", "other.pub"'))
        assert check(policy, "team/tiny").signed_by == KEY.public.keyid
        assert check(policy, "team/tiny", signed(OTHER)).signed_by == OTHER.public.keyid

    def test_the_text_of_a_key_can_stand_in_the_policy(self, load: LoadPolicy) -> None:
        policy = load(f'[[rule]]\nnames = "tiny"\nkeys = ["""\n{KEY.public.pem.decode()}"""]\n')
        assert check(policy, "tiny").signed_by == KEY.public.keyid

    def test_a_file_is_known_by_the_archives_own_name(self, load: LoadPolicy) -> None:
        policy = load('[[rule]]\nnames = "tiny"\nkeys = ["team.pub"]\n')
        assert policy.check(signed(), Reference(signed().name)).result == "valid"

    def test_code_is_allowed_only_by_a_rule_and_a_signature_of_its_key(self, load: LoadPolicy) -> None:
        policy = load(f"{TEAM}allow_code = true\nrequire_signature = false\n")
        assert check(policy, "team/tiny").allow_code
        assert not check(policy, "team/tiny", PLAIN).allow_code
        assert not check(policy, "team/tiny", signed(OTHER)).allow_code
        assert not check(load(TEAM), "team/tiny").allow_code

    def test_a_rule_can_do_without_signatures(self, load: LoadPolicy) -> None:
        policy = load('[[rule]]\nnames = "scratch/*"\nrequire_signature = false\n')
        assert check(policy, "scratch/tiny", PLAIN) == Verdict("unsigned", "rule 1 (names = 'scratch/*')")

    def test_the_keys_of_a_command_accept_their_own_signatures(self, tmp_path: Path) -> None:
        (tmp_path / "a.pub").write_bytes(KEY.public.pem)
        policy = Policy.of_keys([tmp_path / "a.pub"])
        assert check(policy, "any/where/tiny").signed_by == KEY.public.keyid
        assert "is not trusted by" in refusal(policy, "tiny", PLAIN)


WAIVED = '[[rule]]\nnames = "scratch/*"\nrequire_signature = false\n' + TEAM


class TestCheckCopy:
    """A policy that accepts ``scratch/*`` unsigned, and requires a signature of ``team/*``."""

    def copy(self, policy: Policy, source: str, target: str | None, subject: Archive = PLAIN, file: str = "") -> None:
        to = None if target is None else Reference.parse(target)
        policy.check_copy(subject, Reference.parse(source), to, file=file)

    @pytest.mark.parametrize("source", ["oci://registry.local/scratch/tiny:1", "scratch/tiny:1"])
    @pytest.mark.parametrize("target", ["team/tiny:1", "oci://other.local/team/tiny:1"])
    def test_a_name_that_needs_no_signature_is_not_the_way_to_one_that_does(
        self, load: LoadPolicy, source: str, target: str
    ) -> None:
        policy = load(WAIVED)
        with pytest.raises(Untrusted, match=f"{source} .sha256:.*, as 'team/tiny', is not trusted .* it is unsigned"):
            self.copy(policy, source, target)
        self.copy(policy, source, target.replace("team", "scratch"))

    def test_a_files_own_name_counts_and_so_does_the_one_that_it_gets(self, load: LoadPolicy) -> None:
        policy = load(WAIVED)
        with pytest.raises(Untrusted, match=r"evil\.ingot .*, as 'team/tiny', .* it is unsigned"):
            self.copy(policy, "scratch/tiny", "team/tiny:1", file="evil.ingot")
        with pytest.raises(
            Untrusted, match=r"tiny\.ingot .*, as 'tiny', .* no rule names 'tiny'; the rules are for: s"
        ):
            self.copy(policy, "tiny", "team/tiny:1", signed(), file="tiny.ingot")
        self.copy(policy, "team/tiny", "team/tiny:1", signed(), file="tiny.ingot")

    def test_the_name_in_the_store_must_be_that_of_a_rule(self, load: LoadPolicy) -> None:
        with pytest.raises(Untrusted, match=r"as 'tiny', is not trusted .* no rule names 'tiny'"):
            self.copy(load(TEAM), "oci://registry.local/team/tiny:1", "tiny:1", signed())

    def test_a_rule_for_a_registry_applies_to_its_copies_in_the_store(self, load: LoadPolicy) -> None:
        policy = load(f'{TEAM}registry = "registry.local"\n')
        self.copy(policy, "oci://registry.local/team/tiny:1", "team/tiny:1", signed())
        with pytest.raises(Untrusted, match="no rule names"):
            self.copy(policy, "oci://other.local/team/tiny:1", "team/tiny:1", signed())

    def test_a_policy_is_never_without_effect(self, load: LoadPolicy) -> None:
        for target in (None, "oci://elsewhere.local/tiny:1"):
            with pytest.raises(Untrusted, match="it is unsigned"):
                self.copy(load(TEAM), "team/tiny:1", target)
            self.copy(load(TEAM), "team/tiny:1", target, signed())


class TestCheckSelfNamed:
    def test_a_name_inside_a_file_does_not_admit_it_unsigned(self, load: LoadPolicy) -> None:
        free = archive(name="scratch/tiny")
        with pytest.raises(Untrusted, match=r"a\.ingot .* as 'prod', .* no rule names 'prod'"):
            load(WAIVED).check_self_named(free, "prod", file="a.ingot")
        both = load(WAIVED.replace("scratch/*", "**"))
        assert both.check_self_named(free, "prod").result == "unsigned"

    def test_a_signature_for_its_own_name_does(self, load: LoadPolicy) -> None:
        own = archive(name="team/tiny")
        own = own.with_signature(signing.sign(own, own.name, KEY))
        assert load(WAIVED).check_self_named(own, "anything").signed_by == KEY.public.keyid


class TestRules:
    def test_archives_without_a_rule_are_refused(self, load: LoadPolicy) -> None:
        message = refusal(load(TEAM), "tiny:1")
        assert message.endswith("is not trusted by trust.toml: no rule names 'tiny'; the rules are for: team/*")

    def test_an_empty_policy_refuses_everything(self, load: LoadPolicy) -> None:
        assert "no rule names 'tiny'; it has no rules" in refusal(load(""), "tiny:1")

    def test_archives_without_a_rule_can_be_accepted(self, load: LoadPolicy) -> None:
        policy = load(f"require_signature = false\n{TEAM}")
        assert check(policy, "tiny:1", PLAIN) == Verdict("unsigned", "")
        refusal(policy, "team/tiny:1", PLAIN)

    def test_the_first_rule_that_names_it_counts(self, load: LoadPolicy) -> None:
        narrow = '[[rule]]\nnames = "team/tiny"\nkeys = ["other.pub"]\n'
        assert "rule 1 (names = 'team/tiny')" in refusal(load(narrow + TEAM), "team/tiny")
        assert check(load(TEAM + narrow), "team/tiny").rule == "rule 1 (names = 'team/*')"

    def test_a_rule_for_a_registry_is_for_that_one_alone(self, load: LoadPolicy) -> None:
        policy = load(f'{TEAM}registry = "Registry.local:5000"\n')
        check(policy, "oci://registry.local:5000/team/tiny:1")
        for other in ("oci://registry.local/team/tiny:1", "oci://registry.local:500/team/tiny:1", "team/tiny:1"):
            assert "the rules are for: team/* of Registry.local:5000" in refusal(policy, other)

    def test_a_rule_without_a_registry_is_for_all(self, load: LoadPolicy) -> None:
        for where in ("", "oci://registry.local:5000/", "oci+http://evil.example/"):
            check(load(TEAM), f"{where}team/tiny:1")

    @pytest.mark.parametrize("text", ["registry.local", "registry.local:443", "oci://registry.local"])
    def test_the_usual_port_need_not_be_written(self, load: LoadPolicy, text: str) -> None:
        policy = load(f'{TEAM}registry = "{text}"\n')
        check(policy, "oci://registry.local/team/tiny:1")
        check(policy, "oci://registry.local:443/team/tiny:1")
        assert "no rule names 'team/tiny'" in refusal(policy, "oci+http://registry.local/team/tiny:1")

    @pytest.mark.parametrize(
        ("names", "inside", "outside"),
        [
            ("team/*", ["team/tiny"], ["tiny", "team-evil/tiny", "evil/team/tiny", "team/sub/tiny"]),
            ("team/**", ["team/tiny", "team/a/b/tiny"], ["tiny", "team-evil/tiny", "team"]),
            ("**/tiny", ["a/tiny", "a/b/tiny"], ["tiny", "a/tiny/b"]),
            ("**", ["tiny", "a/b/tiny"], []),
            ("*", ["tiny"], ["a/tiny"]),
            ("t?ny", ["tiny", "tony"], ["t/ny", "tiiny", "tny"]),
            ("team/ti*", ["team/tiny", "team/ti"], ["team/tony", "team/ti/ny"]),
            ("t.ny", ["t.ny"], ["tiny"]),
            ("tiny", ["tiny"], ["tiny2", "a-tiny", "tiny/tiny"]),
        ],
    )
    def test_patterns_name_whole_parts(
        self, load: LoadPolicy, names: str, inside: list[str], outside: list[str]
    ) -> None:
        policy = load(f'[[rule]]\nnames = "{names}"\nkeys = ["team.pub"]\n')
        assert [name for name in inside if not policy.rule(Reference(name)).keys] == []
        assert [name for name in outside if policy.rule(Reference(name)).keys] == []

    @pytest.mark.parametrize("name", ["team/../tiny", "team//tiny", "team/tiny\n", "team/./tiny", "", "Team/tiny"])
    def test_a_name_that_no_model_can_have_is_refused(self, load: LoadPolicy, name: str) -> None:
        with pytest.raises(InvalidArgument, match="cannot name a model"):
            load(TEAM).check(signed(), Reference(name))


WRONG = {
    "a slip in a field": ("require_signatur = false\n", "there is no field 'require_signatur'; there are: require_s"),
    "a slip in a rule": (TEAM + "alow_code = true\n", "rule 1: there is no field 'alow_code'; there are: names, reg"),
    "a slip in a table": ('[[rules]]\nnames = "*"\n', "there is no field 'rules'; there are: require_signature, rule"),
    "a rule that is not a list": ('[rule]\nnames = "*"\n', "'rule'"),
    "no names": ('[[rule]]\nkeys = ["team.pub"]\n', "rule 1: 'names': Field required"),
    "text for yes": ('require_signature = "no"\n', "'require_signature': Input should be a valid boolean"),
    "a number for no": ("require_signature = 0\n", "'require_signature': Input should be a valid boolean"),
    "a key by itself": ('[[rule]]\nnames = "*"\nkeys = "team.pub"\n', "rule 1: 'keys'"),
    "a field twice": ("require_signature = true\nrequire_signature = false\n", "is not valid TOML"),
    "no TOML": ("\x00", "is not valid TOML"),
    "too deep": ("x = " + "[" * 5000, "is not valid TOML"),
    "no keys": ('[[rule]]\nnames = "team/*"\n', "a signature is required, and no keys are accepted"),
    "code of anybody": (
        '[[rule]]\nnames = "*"\nrequire_signature = false\nallow_code = true\n',
        "allow_code applies to signed models only",
    ),
    "a class of characters": (
        '[[rule]]\nnames = "team/[a-z]"\nkeys = ["team.pub"]\n',
        "is not a pattern of model names",
    ),
    "an empty part": ('[[rule]]\nnames = "team//x"\nkeys = ["team.pub"]\n', "is not a pattern of model names"),
    "a registry with a path": (TEAM + 'registry = "host/team"\n', "rule 1 .* is not a registry address"),
    "a private key": ('[[rule]]\nnames = "*"\nkeys = ["team.key"]\n', "team.key is a private key, not a public key"),
    "a text that is not a key": (
        '[[rule]]\nnames = "*"\nkeys = ["-----BEGIN CERTIFICATE-----"]\n',
        "rule 1 .*: key 1 is a certificate, not a public key",
    ),
}


class TestLoad:
    @pytest.mark.parametrize("case", WRONG)
    def test_a_policy_that_is_not_understood_is_refused(self, load: LoadPolicy, tmp_path: Path, case: str) -> None:
        (tmp_path / "team.key").write_bytes(KEY.pem())
        text, message = WRONG[case]
        with pytest.raises(InvalidArgument, match=message):
            load(text)

    def test_a_missing_policy(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="there is no file"):
            Policy.load(tmp_path / "trust.toml")

    def test_a_missing_key(self, load: LoadPolicy) -> None:
        with pytest.raises(
            NotFound, match=r"rule 1 .* there is no file .*lost\.pub; keys are files relative to the policy"
        ):
            load('[[rule]]\nnames = "*"\nkeys = ["lost.pub"]\n')

    @pytest.mark.parametrize("name", ["trust.toml", "team.pub"])
    def test_a_file_that_everybody_can_write_is_refused(self, load: LoadPolicy, tmp_path: Path, name: str) -> None:
        load(TEAM)
        (tmp_path / name).chmod(0o646)
        with pytest.raises(InvalidArgument, match=f"{name} can be changed by every user"):
            Policy.load(tmp_path / "trust.toml")
