"""``ingot keygen``, ``sign`` and ``verify``: signatures of archives."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives import Json, StoreOption, check_out
from ingot.cli.output import note, print_json, progress, say, size
from ingot.errors import AlreadyExists, InvalidArgument, Untrusted, write_error

if TYPE_CHECKING:
    from ingot.model_store import Archive, Reference
    from ingot.model_store.places import Located
    from ingot.model_store.trust.keys import PrivateKey
    from ingot.model_store.trust.policy import Policy, Verdict

Model = Annotated[str, typer.Argument(help="An archive file, or a reference such as digits:1.")]


def keygen(
    out: Annotated[Path, typer.Option("--out", "-o", help="The name of the files, without suffix.")] = Path("ingot"),
    as_json: Json = False,
) -> None:
    """Create a private key to sign with, OUT.key, and the public key to verify with, OUT.pub."""
    from ingot.model_store.trust.keys import PrivateKey

    private, public = out.with_name(f"{out.name}.key"), out.with_name(f"{out.name}.pub")
    for path in (private, public):
        _check_new(path)
    password = os.environ.get("INGOT_KEY_PASSWORD") or _ask("Password for the key (empty for none)", confirm=True)
    key = PrivateKey.generate()
    _write_new(private, key.pem(password), 0o600)
    with ExitStack() as undo:  # no private key without its public one
        undo.callback(private.unlink)
        _write_new(public, key.public.pem, 0o644)
        undo.pop_all()
    if not password:
        note(f"{private} is not encrypted: anyone who can read it can sign; INGOT_KEY_PASSWORD encrypts it")
    if as_json:
        print_json({"key": str(private), "public": str(public), "keyid": key.public.keyid})
        return
    say(f"{private}  to sign with; keep it secret")
    say(f"{public}  to verify with; key id {key.public.keyid}")


def sign(
    model: Model,
    key: Annotated[Path, typer.Option(help="The private key, from ingot keygen.")],
    replace: Annotated[bool, typer.Option("--replace", help="Drop all other signatures of the archive.")] = False,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Sign an archive: the signature binds its digest to the model's name."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate
    from ingot.model_store.trust import signing

    private = _private_key(key)
    located = locate(model, Store(store)).whole()
    if located.url is not None:
        raise InvalidArgument(
            f"{located.url} cannot be written; sign a file or an archive in the store, and upload that"
        )
    archive, found = located.find()
    keyid, name = private.public.keyid, found.name
    finding = signing.check(archive, name, {keyid: private.public})
    added = finding.result != "valid" or (replace and len(archive.attached) > 1)
    if added:
        signed = archive.with_signature(signing.sign(archive, name, private), replace=replace)
        _attach(located, signed, name, replace=replace)
    else:
        note(f"{_title(located, found)} is signed by this key already")
    if as_json:
        subject = signing.subject_name(name)
        print_json({"name": subject, "digest": archive.digest, "keyid": keyid, "added": added})
    else:
        say(f"{signing.subject_name(name)}  {archive.digest}  signed by {keyid}")


def verify(
    model: Model,
    trust: Annotated[
        Path | None, typer.Option(help="The trust policy.", show_default="INGOT_TRUST, unless --key is given")
    ] = None,
    key: Annotated[
        list[Path] | None, typer.Option(help="An accepted public key, instead of a policy; repeatable.")
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Check that an archive is trusted and, in a file or the store, that the digests of all blobs match."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate
    from ingot.model_store.trust import signing

    policy = _policy(trust, key)
    located = locate(model, Store(store)).whole()
    archive, found = located.find()
    subject = {"name": found.name, "digest": archive.digest}
    claims = [asdict(claim) for claim in signing.describe(archive)]
    try:
        verdict = policy.check(archive, found, file="" if located.place else located.name)
    except Untrusted as error:
        if as_json:
            print_json({**subject, "result": "refused", "reason": str(error), "signatures": claims})
        raise
    local = found.registry is None
    if local:
        with progress("Reading every blob"):
            archive.verify()
    if as_json:
        print_json({**subject, **asdict(verdict), "blobs_checked": local, "signatures": claims})
    else:
        say(f"{_title(located, found)}  {archive.digest}")
        _print(archive, verdict, local)


def _title(located: Located, found: Reference) -> str:
    """Return an archive's file or reference."""
    return str(located.path or located.url or dataclasses.replace(found, digest=None))


def _print(archive: Archive, verdict: Verdict, local: bool) -> None:
    if verdict.signed_by:
        say(f"signed by {verdict.signed_by}, {verdict.created}")
    else:
        say(f"{verdict.result}, which the policy allows")
    if verdict.rule:
        say(f"by {verdict.rule}; code {'allowed' if verdict.allow_code else 'not allowed'}")
    if local:
        say(f"{size(archive.size)} checked; all digests match")


def _policy(trust: Path | None, keys: list[Path] | None) -> Policy:
    from ingot.model_store.trust.policy import Policy

    if trust is not None and keys:
        raise InvalidArgument("--trust and --key cannot be given together; put the key into the policy")
    if keys:
        return Policy.of_keys(keys)
    variable = os.environ.get("INGOT_TRUST")
    path = trust or (Path(variable) if variable else None)
    if path is None:
        raise InvalidArgument("there is no trust policy; give one (--trust trust.toml) or a key (--key ingot.pub)")
    return Policy.load(path)


def _attach(located: Located, signed: Archive, name: str, *, replace: bool) -> None:
    """Put an archive with a new signature where it was found."""
    if located.place is not None:
        located.place.attach(signed, name, replace=replace)
    elif located.path is not None:
        try:
            signed.save(located.path)
        except KeyboardInterrupt:
            note(f"interrupted; {located.path} is unchanged")
            raise


def _private_key(path: Path) -> PrivateKey:
    from ingot.model_store.trust.keys import PrivateKey, read_file

    pem = read_file(path.expanduser())
    key = PrivateKey.parse(pem, str(path), _password)
    if b"ENCRYPTED" not in pem and path.expanduser().stat().st_mode & 0o077:
        note(f"{path} can be read by other users of this machine; chmod 600 {path}")
    return key


def _password() -> str:
    return os.environ.get("INGOT_KEY_PASSWORD") or _ask("Password of the key", confirm=False)


def _ask(question: str, *, confirm: bool) -> str:
    """Ask for a password on the terminal; without a terminal it is empty."""
    if not sys.stdin.isatty():
        return ""
    return str(
        typer.prompt(question, default="", hide_input=True, confirmation_prompt=confirm, show_default=False, err=True)
    )


def _check_new(path: Path) -> None:
    check_out(path)
    if path.exists() or path.is_symlink():
        raise AlreadyExists(f"{path} already exists, and keys are not overwritten; choose another name with --out")


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that no other user can read or replace before it has its mode."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise AlreadyExists(f"{path} already exists, and keys are not overwritten") from None
    except OSError as error:
        raise write_error(f"cannot write {path}", error) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise write_error(f"cannot write {path}", error) from error
