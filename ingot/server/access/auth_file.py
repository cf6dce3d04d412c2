"""The file of ``--auth``: API keys, the issuer of tokens, and the rights of client certificates.

It is TOML. Unknown fields are errors, so that a typo does not widen access. ``ingot server keys`` changes only its
own lines.
The format is described in docs/guides/operate/access.md.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ingot.errors import InvalidArgument, NotFound, write_error
from ingot.faults import rate_limited_logger
from ingot.model_store.blobs.files import atomic_file
from ingot.model_store.trust.keys import read_file
from ingot.server.access.keys import NAME, ApiKey
from ingot.server.access.peers import Certificate
from ingot.server.access.tokens import ALGORITHMS, Algorithm, Issuer, load_keys, own_scopes

log = rate_limited_logger(__name__)

MAX_FILE_BYTES = 4 << 20
_HEADER = "# API keys of ingot serve --auth. Only hashes are stored. Change keys with ingot server keys.\n"
_BLOCK = re.compile(r"^\[\[key\]\][ \t]*(?:#.*)?$", re.MULTILINE)
_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)

_Scopes = Annotated[
    frozenset[Literal["infer", "manage", "metrics"]], Field(min_length=1, strict=False)
]  # the texts of SCOPES


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Key(_Table):
    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    name: str = Field(pattern=f"^{NAME.pattern}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    scopes: _Scopes
    created: AwareDatetime | None = None
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None


class _Certificate(_Table):
    subject: str | None = Field(None, min_length=1)
    san: str | None = Field(None, pattern=r"^(DNS|URI|IP|email):.")
    scopes: _Scopes

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.subject is None) == (self.san is None):
            raise ValueError("give either subject or san")
        return self


class _Jwt(_Table):
    issuer: str = Field(min_length=1)
    audience: str = Field(min_length=1)
    jwks: str = Field(min_length=1)
    algorithms: tuple[Algorithm, ...] = Field(ALGORITHMS, min_length=1, strict=False)
    scope_claim: str = Field("scope", min_length=1)
    scopes: Mapping[str, _Scopes] | None = None
    leeway: int = Field(30, ge=0, le=300)


class _File(_Table):
    jwt: _Jwt | None = None
    certificate: tuple[_Certificate, ...] = Field((), max_length=10_000, strict=False)
    key: tuple[_Key, ...] = Field((), max_length=20_000, strict=False)


@dataclass(frozen=True, kw_only=True)
class AuthFile:
    """The parsed file. ``files`` are the files that it references, read with it."""

    keys: Mapping[str, ApiKey]
    certificates: Sequence[_Certificate] = ()
    issuer: Issuer | None = None
    files: tuple[Path, ...] = ()

    def scopes_of(self, certificate: Certificate) -> frozenset[str]:
        """Return the rights of a client certificate: those of all its entries together."""
        return frozenset(
            scope
            for entry in self.certificates
            if entry.subject == certificate.subject or entry.san in certificate.names
            for scope in entry.scopes
        )

    @classmethod
    def load(cls, path: Path) -> AuthFile:
        """Read the file.

        Raises:
            NotFound: there is no such file.
            InvalidArgument: it is invalid, or every user can write it; the message names the fault.
        """
        path = path.expanduser()
        content = read_file(path, trusted=True, limit=MAX_FILE_BYTES)
        with contextlib.suppress(OSError):
            if path.stat().st_mode & stat.S_IROTH:
                log.warning("%s can be read by every user of this machine; chmod o-r %s", path, path)
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> AuthFile:
        """Parse the content of the file ``path``; raises as :meth:`load`."""
        try:
            table = _File.model_validate(tomllib.loads(content.decode()))
        except ValidationError as error:
            raise InvalidArgument(f"{path} is not valid: {_fault(error)}") from error
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} is not valid TOML: {error}") from error
        keys = {key.id: ApiKey(**dict(key)) for key in table.key}
        if len(keys) < len(table.key):
            ids = [key.id for key in table.key]
            twice = next(one for one in ids if ids.count(one) > 1)
            raise InvalidArgument(f"{path} is not valid: it has two keys with the id {twice}")
        if table.jwt is None:
            return cls(keys=keys, certificates=table.certificate)
        jwks = path.parent / Path(table.jwt.jwks).expanduser()
        return cls(keys=keys, certificates=table.certificate, issuer=_issuer(table.jwt, jwks), files=(jwks,))


def _issuer(table: _Jwt, jwks: Path) -> Issuer:
    return Issuer(
        name=table.issuer,
        audience=table.audience,
        keys=load_keys(jwks, table.algorithms),
        claim=table.scope_claim,
        scopes=own_scopes() if table.scopes is None else table.scopes,
        leeway=table.leeway,
    )


def add_key(path: Path, key: ApiKey) -> None:
    """Append a key to the file, which is created if there is none.

    Raises:
        InvalidArgument: the file is invalid or cannot be written.
    """

    def change(text: str) -> str:
        scopes = ", ".join(f'"{scope}"' for scope in sorted(key.scopes))
        lines = ["[[key]]", f'id = "{key.id}"', f'name = "{key.name}"', f'hash = "{key.hash}"', f"scopes = [{scopes}]"]
        lines += [f"{name} = {_time(when)}" for name in ("created", "expires") if (when := getattr(key, name))]
        gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        return "".join((text or _HEADER + "\n", gap, "\n".join(lines), "\n"))

    _rewrite(path, change, lambda before: {**before, key.id: key}, create=True)


def revoke_key(path: Path, key: ApiKey, now: datetime.datetime) -> None:
    """Mark a key of the file as revoked.

    Raises:
        InvalidArgument: the file cannot be written, or the key's lines cannot be found in it.
    """
    revoked = ApiKey(**{**vars(key), "revoked": now})

    def change(text: str) -> str:
        own = re.compile(rf"^[ \t]*id[ \t]*=[ \t]*[\"']{key.id}[\"']", re.MULTILINE)
        for block in _BLOCK.finditer(text):
            end = following.start() if (following := _TABLE.search(text, block.end())) else len(text)
            if own.search(text, block.end(), end):
                return f"{text[: block.end()]}\nrevoked = {_time(now)}{text[block.end() :]}"
        raise InvalidArgument(
            f"{path}: the lines of key {key.id} are not as ingot server keys writes them; edit the file"
        )

    _rewrite(path, change, lambda before: {**before, key.id: revoked})


def _time(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _rewrite(
    path: Path,
    change: Callable[[str], str],
    expected: Callable[[Mapping[str, ApiKey]], Mapping[str, ApiKey]],
    *,
    create: bool = False,
) -> None:
    """Replace the file's text atomically, if the new text means what is expected; its other lines stay."""
    path = Path(os.path.realpath(path.expanduser()))
    with _locked(path):
        try:
            before = read_file(path, trusted=True, limit=MAX_FILE_BYTES)
        except NotFound:
            if not create:
                raise
            before = b""
        wanted = expected(AuthFile.parse(before, path).keys)
        after = change(before.decode()).encode()
        if AuthFile.parse(after, path).keys != wanted:
            raise InvalidArgument(f"{path} cannot be changed without changing other keys; edit it by hand")
        try:
            with atomic_file(path, mode=0o600, durable=True) as stream:
                stream.write(after)
        except OSError as error:
            raise write_error(f"cannot write {path}", error) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other ``ingot server keys`` from changing the file at the same time."""
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise write_error(f"cannot write {path}", error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fault(error: ValidationError) -> str:
    """Describe the first fault in terms of the file, without the values."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    loc = [f"{part + 1}" if isinstance(part, int) else str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return f"there is no field '{' '.join(loc)}'"
    if loc[-1:] == ["hash"]:
        return f"'{' '.join(loc)}' is not the hash of a key, which ingot server keys create writes"
    return f"'{' '.join(loc)}': {first['msg']}"
