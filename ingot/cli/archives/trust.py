"""``ingot trust``: keys, and signatures of archives, and of files and folders for other tools."""

from __future__ import annotations

import dataclasses
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.cli.archives.inspect import signatures
from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption
from ingot.cli.output import note, print_json, progress, say, size
from ingot.errors import AlreadyExists, InvalidArgument, NotFound, Untrusted, write_error

if TYPE_CHECKING:
    from ingot.model_store import Archive, Reference
    from ingot.model_store.places import Located
    from ingot.model_store.trust.keys import PrivateKey
    from ingot.model_store.trust.policy import Policy, Verdict

trust = typer.Typer(help="Sign archives, and check who signed them.", no_args_is_help=True)

Model = Annotated[
    str,
    typer.Argument(
        help="An archive file, or a reference such as digits:1; with bundles, also another file or a folder.",
        autocompletion=references,
    ),
]


@trust.command()
def keygen(
    out: Annotated[Path, typer.Option("--out", "-o", help="The name of the files, without suffix.")] = Path("ingot"),
    as_json: Json = False,
) -> None:
    """Create a private key to sign with, OUT.key, and the public key to verify with, OUT.pub.

    The keys are ECDSA on the curve P-256, in PEM. The private key is readable only by its owner, and encrypted if
    INGOT_KEY_PASSWORD is set or a password is entered on the terminal. Existing files are never overwritten.

    Examples:

        ingot trust keygen --out team
    """
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


@trust.command()
def sign(
    model: Model,
    key: Annotated[Path, typer.Option(help="The private key, from ingot trust keygen.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="ingot: attached to the archive. cosign: the same for cosign. oms: an OpenSSF Model Signing bundle.",
        ),
    ] = "ingot",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The bundle to write.", show_default="MODEL.sig, with oms")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Drop all other signatures of the archive.")] = False,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Sign an archive: the signature binds its digest to the model's name.

    MODEL is a file, which is rewritten, or a reference of the store or a registry. The archive's digest does not
    change, and an archive that the key has signed is not signed again. With --format oms, MODEL is a file or a folder,
    and MODEL.sig is a bundle over it.

    Examples:

        ingot trust sign digits:1.2.0 --key team.key
        ingot trust sign digits-1.2.0.ingot --key team.key --format oms
    """
    _check_format(form, out, replace=replace)
    if form == "oms":
        _sign_files(model, key, out, as_json)
    else:
        _sign_archive(model, key, form, replace, store, as_json)


@trust.command()
def verify(
    model: Model,
    trust: Annotated[
        Path | None, typer.Option(help="The trust policy.", show_default="INGOT_TRUST, unless --key is given")
    ] = None,
    key: Annotated[
        list[Path] | None, typer.Option(help="An accepted public key, instead of a policy; repeatable.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="The bundle of OpenSSF Model Signing of a file or folder.", show_default="MODEL.sig"),
    ] = None,
    store: StoreOption = None,
    as_json: Json = False,
) -> None:
    """Check that an archive is trusted and, in a file or the store, that the digests of all blobs match.

    The exit code is 1 if the archive is damaged or not trusted; the message names the signatures found, the accepted
    keys and the remedy. A file or folder that is not an archive is compared with its bundle of OpenSSF Model Signing.

    Examples:

        ingot trust verify digits:1.2.0 --trust trust.toml
        ingot trust verify oci://registry.local:5000/team/digits:1.2.0 --key team.pub
        ingot trust verify ./folder --bundle folder.sig --key team.pub
    """
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    if _is_plain(model, bundle):
        _verify_files(model, trust, key, bundle, as_json)
        return
    policy = _policy(trust, key)
    located = locate(model, Store(store)).whole()
    archive, found = located.find()
    if bundle is not None and archive.file is None:
        raise InvalidArgument(f"--bundle is for files, and '{model}' is not one; ingot copy writes it as one")
    subject = {"name": found.name, "digest": archive.digest}
    claims = signatures(archive)
    try:
        verdict = policy.check(archive, found, file="" if located.place else located.name, bundle=bundle)
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
        when = f", {verdict.created}" if verdict.created else ""
        say(f"signed by {verdict.signed_by}{when}{'' if verdict.format == 'ingot' else f' (format {verdict.format})'}")
    else:
        say(f"{verdict.result}, which the policy allows")
    if verdict.rule:
        say(f"by {verdict.rule}; code {'allowed' if verdict.allow_code else 'not allowed'}")
    if local:
        say(f"{size(archive.size)} checked; all digests match")


def _sign_archive(model: str, key: Path, form: str, replace: bool, store: Path | None, as_json: bool) -> None:
    """Attach a signature to an archive, unless the key has signed it already."""
    from ingot.model_store import Store
    from ingot.model_store.places import locate
    from ingot.model_store.trust import cosign, signing

    private = _private_key(key)
    located = locate(model, Store(store)).whole()
    if located.url is not None:
        raise InvalidArgument(
            f"{located.url} cannot be written; sign a file or an archive in the store, and upload that"
        )
    archive, found = located.find()
    keyid, name = private.public.keyid, found.name
    check = cosign.check if form == "cosign" else signing.check
    others = replace and len(signing.describe(archive)) > 1
    added = check(archive, name, {keyid: private.public}).result != "valid" or others
    if added:
        if form == "cosign":
            signed = cosign.sign(archive, found, private)
        else:
            signed = archive.with_signature(signing.sign(archive, name, private), replace=replace)
        _attach(located, signed, name, replace=replace)
    else:
        note(f"{_title(located, found)} is signed by this key already")
    if as_json:
        subject = signing.subject_name(name)
        print_json({"name": subject, "digest": archive.digest, "keyid": keyid, "added": added})
    else:
        say(f"{signing.subject_name(name)}  {archive.digest}  signed by {keyid}")


def _check_format(form: str, out: Path | None, *, replace: bool) -> None:
    """Raise InvalidArgument if there is no such format of signatures, or an option does not apply to it."""
    from ingot.model_store.trust.rules import FORMATS

    if form not in FORMATS:
        raise InvalidArgument(f"--format is '{form}'; there are: {', '.join(FORMATS)}")
    if form != "oms" and out is not None:
        raise InvalidArgument("--out names the bundle of --format oms; other signatures are attached to the archive")
    if form != "ingot" and replace:
        raise InvalidArgument(f"--replace drops Ingot's signatures, and --format is {form}; leave one out")


def _sign_files(model: str, key: Path, out: Path | None, as_json: bool) -> None:
    """Write a bundle of OpenSSF Model Signing over a file or a folder."""
    from ingot.model_store.blobs.files import atomic_file
    from ingot.model_store.trust import oms

    path = Path(model).expanduser()
    if not path.exists():
        raise NotFound(
            f"there is no file or folder {model}, and --format oms signs those; ingot copy writes an archive as a file"
        )
    target = out or oms.beside(path)
    check_out(target)
    check_apart(target, model=path, key=key)
    if target.exists() and not oms.is_bundle(target):
        raise AlreadyExists(f"{target} exists and is not a bundle; name another file with --out")
    private = _private_key(key)
    with progress("Reading every file"):
        content = oms.sign(path, private, out=target)
    try:
        with atomic_file(target) as stream:
            stream.write(content)
    except OSError as error:
        raise write_error(f"cannot write {target}", error) from error
    if as_json:
        print_json({"bundle": str(target), "model": str(path), "keyid": private.public.keyid})
    else:
        say(f"{target}  signs {path}, by {private.public.keyid}")


def _is_plain(model: str, bundle: Path | None) -> bool:
    """Return whether a bundle is to be verified over something other than an archive: a folder, or another file."""
    from ingot.model_store.places import is_file

    path = os.path.expanduser(model)  # noqa: PTH111 - Path.expanduser raises for unknown users
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for names that are too long
        return is_file(model) or bundle is not None
    return bundle is not None and not model.endswith(".ingot") and os.path.isfile(path)  # noqa: PTH113


def _verify_files(model: str, trust: Path | None, keys: list[Path] | None, bundle: Path | None, as_json: bool) -> None:
    """Check a file or folder against its bundle, and report the key that signed it."""
    from ingot.model_store.trust import oms
    from ingot.model_store.trust.keys import PublicKey, read_file

    if trust is not None or not keys:
        raise InvalidArgument(
            f"{model} is not an archive, and policies are for archives; give the key (--key team.pub)"
        )
    path = Path(model).expanduser()
    bundle = bundle or oms.beside(path)
    accepted = [PublicKey.parse(read_file(item.expanduser()), str(item)) for item in keys]
    with progress("Reading every file"):
        keyid = oms.verify(path, bundle, {key.keyid: key for key in accepted})
    if as_json:
        print_json({"model": str(path), "bundle": str(bundle), "result": "valid", "signed_by": keyid, "format": "oms"})
    else:
        say(f"{path}\nsigned by {keyid} (format oms)\nall files match {bundle}")


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
            note(f"{located.path} is unchanged")
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
