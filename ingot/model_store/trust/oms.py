"""OpenSSF Model Signing (OMS) 1.0: a detached bundle that signs a file, or all files of a folder.

A bundle is a Sigstore bundle (JSON) around a DSSE envelope, around an in-toto statement that lists each file with its
digest. The package ``model-signing`` makes and verifies the same. Only bundles signed with a key are supported:
certificates and Sigstore's identities would need authorities, and mostly a network.

Specification: https://github.com/ossf/model-signing-spec/blob/main/spec/v1.0.md
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from ingot.errors import IngotError, InvalidArchive, InvalidArgument, Untrusted
from ingot.model_store.format.archive import Archive
from ingot.model_store.trust import dsse, model_files
from ingot.model_store.trust.dsse import Lenient, parse
from ingot.model_store.trust.keys import PrivateKey, PublicKey, read_file
from ingot.model_store.trust.model_files import Serialization
from ingot.model_store.trust.signing import Finding, subject_name

SUFFIX: Final = ".sig"
PREDICATE_TYPE: Final = "https://model_signing/signature/v1.0"
MAX_BUNDLE_BYTES = 32 << 20  # a statement of the largest archive, with 100,000 blobs
MAX_RESOURCES = 200_000
_SHOWN = 4
_FORM = "the format of OpenSSF Model Signing 1.0"


class _KeyHint(Lenient):
    hint: str | None = None  # absent before version 1.1 of model-signing


class _Material(Lenient):
    public_key: _KeyHint | None = None
    certificate: Any = None
    x509_certificate_chain: Any = None


class _Bundle(dsse.Bundle):
    verification_material: _Material


class _Digests(Lenient):
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class _Subject(Lenient):
    name: str = Field(min_length=1)
    digest: _Digests


class _Resource(Lenient):
    name: str = Field(min_length=1, max_length=4096)
    digest: Annotated[str, Field(pattern=r"\A(?:[0-9a-f]{2}){1,128}\z")]
    algorithm: str


class _Serialization(Lenient):
    model_config = ConfigDict(alias_generator=None)

    method: Literal["files", "shards"]
    hash_type: str
    allow_symlinks: bool
    shard_size: int | None = Field(None, ge=1)
    ignore_paths: tuple[str, ...] = Field((), max_length=MAX_RESOURCES, strict=False)


class _Predicate(Lenient):
    resources: tuple[_Resource, ...] = Field(min_length=1, max_length=MAX_RESOURCES, strict=False)
    serialization: _Serialization


class _Statement(Lenient):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[_Subject, ...] = Field(min_length=1, max_length=1, strict=False)
    predicate_type: Literal["https://model_signing/signature/v1.0"]
    predicate: _Predicate


def beside(path: Path) -> Path:
    """Return the file in which the bundle of a file or folder is looked for and written: ``digits.ingot.sig``."""
    return path.parent / f"{path.absolute().name}{SUFFIX}"


def is_bundle(path: Path) -> bool:
    """Return whether a file is a bundle, of any signer."""
    try:
        parse(_Bundle, read_file(path, limit=MAX_BUNDLE_BYTES), str(path))
    except IngotError:
        return False
    return True


def sign(path: Path, key: PrivateKey, *, out: Path, ignored: Collection[str] = ()) -> bytes:
    """Return a bundle over a file, or over all files of a folder. Every byte is read.

    Args:
        path: the file or folder.
        key: the signer's key.
        out: where the bundle will be written; a file of that name in the folder is not signed.
        ignored: further paths in the folder that are not signed.

    Raises:
        InvalidArgument: the folder has no files, or something other than files and folders.
    """
    method = Serialization(ignored=model_files.excluded(path, out, ignored))
    digests = method.digests(path)
    names = sorted(digests)
    predicate = {
        "resources": [{"name": name, "algorithm": "sha256", "digest": digests[name]} for name in names],
        "serialization": method.record(),
    }
    root = _root(digests[name] for name in names)
    statement = dsse.statement(path.absolute().name, root, PREDICATE_TYPE, predicate)
    return dsse.bundle(statement, key, _hint(key.public))


def verify(
    path: Path,
    bundle: Path,
    keys: Mapping[str, PublicKey],
    *,
    ignored: Collection[str] = (),
    allow_unsigned: bool = False,
) -> str:
    """Check a file, or all files of a folder, against a bundle; return the id of the key that signed it.

    Args:
        path: the file or folder.
        bundle: the bundle; it need not be signed itself if it is in the folder.
        keys: the accepted keys, by key id.
        ignored: paths in the folder that need not be signed, in addition to those that the bundle names.
        allow_unsigned: ignore files of the folder that the bundle does not list.

    Raises:
        NotFound: there is no bundle.
        Untrusted: no accepted key signed it.
        InvalidArchive: it is not a bundle, is damaged, or a file differs, is missing or is not listed.
    """
    keyid, signed, recorded = _opened(bundle, keys)
    method = Serialization(
        algorithm=recorded.hash_type,
        shard_size=recorded.shard_size,
        links=recorded.allow_symlinks,
        ignored=model_files.excluded(path, bundle, (*recorded.ignore_paths, *ignored)),
    )
    if path.is_file() and list(signed) == ["."]:  # as model-signing names a single file
        signed = {path.absolute().name: signed["."]}
    _compare(method.digests(path, only=signed if allow_unsigned else None), signed, f"{path}, signed by {bundle}")
    return keyid


def check(archive: Archive, name: str, keys: Mapping[str, PublicKey], bundle: Path | None = None) -> Finding:
    """Look for an accepted bundle of an archive file. An archive in the store or in a registry has no bundle.

    Args:
        archive: the archive.
        name: the name by which it was found. It must be the archive's own, which the bundle signs with the file.
        keys: the accepted keys, by key id.
        bundle: its bundle; by default the file ``FILE.sig``.
    """
    path = archive.file
    if path is None:
        return Finding("unsigned")
    bundle = bundle or beside(path)
    if not bundle.exists():
        return Finding("unsigned")
    try:
        keyid = verify(path, bundle, keys)
        if subject_name(archive.name) != subject_name(name):
            raise InvalidArchive(f"it is signed under the name '{archive.name}' and not '{subject_name(name)}'")
    except Untrusted as error:
        return Finding("untrusted", faults=(str(error),))
    except InvalidArgument as error:
        return Finding("invalid", faults=(str(error),))
    return Finding("valid", keyid, format="oms")


def _opened(bundle: Path, keys: Mapping[str, PublicKey]) -> tuple[str, dict[str, str], _Serialization]:
    """Return the key that signed a bundle, the signed digests by name, and how they were made."""
    where = str(bundle)
    parsed = parse(_Bundle, read_file(bundle, limit=MAX_BUNDLE_BYTES), where, _FORM)
    keyid, payload = _verified(parsed, keys, where)
    statement = parse(_Statement, payload, f"the statement of {where}", _FORM)
    resources, recorded = statement.predicate.resources, statement.predicate.serialization
    signed = {resource.name: resource.digest for resource in resources}
    if len(signed) < len(resources):
        raise InvalidArchive(f"{where} lists a file twice")
    if any(resource.algorithm != recorded.hash_type for resource in resources):
        raise InvalidArchive(f"{where} lists digests of another kind than {recorded.hash_type}")
    if _root(resource.digest for resource in resources) != statement.subject[0].digest.sha256:
        raise InvalidArchive(f"{where} has a subject other than the files that it lists")
    if (recorded.method == "shards") != (recorded.shard_size is not None):
        raise InvalidArchive(f"{where} has shards without a size, or a size without shards")
    return keyid, signed, recorded


def _verified(bundle: _Bundle, keys: Mapping[str, PublicKey], where: str) -> tuple[str, bytes]:
    """Return the key id of the accepted key that signed a bundle, and the signed statement."""
    material = bundle.verification_material
    if material.public_key is None:
        kind = "Sigstore's certificate of an identity" if material.certificate else "a certificate"
        raise Untrusted(
            f"{where} is signed with {kind if material.certificate or material.x509_certificate_chain else 'nothing'}, "
            "which Ingot does not verify: sign with a key (model_signing sign key), or verify it with model_signing"
        )
    # A hint only orders the work: its form differs between implementations.
    hint = material.public_key.hint
    hinted = {keyid: key for keyid, key in keys.items() if hint in (_hint(key), keyid)}
    payload, signatures = bundle.dsse_envelope.content, bundle.dsse_envelope.signed
    if len(signatures) != 1:
        raise InvalidArchive(f"{where} has {len(signatures)} signatures, and {_FORM} has one")
    content = dsse.encoding(payload)
    for keyid, key in (hinted or keys).items():
        if key.verify(signatures[0], content):
            return keyid, payload
    if hinted:
        raise InvalidArchive(f"the signature in {where} does not match its content, which was changed")
    raise Untrusted(f"{where} is not signed by an accepted key")


def _compare(there: Mapping[str, str], signed: Mapping[str, str], where: str) -> None:
    faults = [f"'{name}' is missing" for name in signed.keys() - there.keys()]
    faults += [f"'{name}' is not signed" for name in there.keys() - signed.keys()]
    faults += [f"'{name}' was changed" for name in signed.keys() & there.keys() if signed[name] != there[name]]
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise InvalidArchive(f"{where}: {', '.join(sorted(faults)[:_SHOWN])}{more}")


def _root(digests: Any) -> str:
    """Return the digest of a list of digests in hex, by which other documents refer to the model."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _hint(key: PublicKey) -> str:
    """Return the fingerprint by which model-signing identifies a key."""
    return hashlib.sha256(key.pem).hexdigest()
