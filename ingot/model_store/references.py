"""References: how users name archives, ``[oci://host[:port]/]name[:tag][@sha256:...][#variant]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

from ingot.addresses import is_loopback
from ingot.errors import InvalidArgument, NotFound

# The grammar of OCI distribution, so that every local name is also a valid remote name.
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
# User input may also contain upper case, which repositories do not allow.
_WRITTEN = re.compile(_NAME.pattern.replace("a-z", "A-Za-z"))
_SCHEMES = ("oci", "oci+http", "oci+https")
_REGISTRY = re.compile(
    rf"(?P<scheme>{'|'.join(map(re.escape, _SCHEMES))})://"
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_REFERENCE = re.compile(
    rf"(?:(?P<registry>{re.sub(r'[?]P<[a-z]+>', '?:', _REGISTRY.pattern)})/)?"
    rf"(?P<name>{_WRITTEN.pattern})"
    rf"(?::(?P<tag>{_TAG.pattern}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
    r"(?:#(?P<variant>[A-Za-z0-9][A-Za-z0-9._-]*))?"
)
# A model 'a/index.json' would collide with the file in which model 'a' keeps its tags.
_RESERVED = frozenset(("oci-layout", "index.json", "reflog.jsonl", "blobs"))
_ATTACHED = re.compile(r"sha256-[0-9a-f]{64}")
_ATTACHED_BY_COSIGN = re.compile(rf"{_ATTACHED.pattern}\.(?:sig|att|sbom)")
_VERSION = re.compile(r"v?\d[\w.-]*")
_SHOWN = 20

HUB: Final = ("docker.io", "index.docker.io", "registry-1.docker.io")
"""Docker Hub's names, as in credential files. The last is the host of its registry."""


PULLED: Final = "oci"
"""First component of the names under which servers keep downloads; see :func:`pulled_name`."""


@dataclass(frozen=True)
class RegistryAddress:
    """The address of an OCI registry. HTTPS is used, or plain HTTP for this machine and if the scheme says so.

    ``oci`` derives that from the host; ``oci+http`` and ``oci+https`` are explicit.
    """

    host: str
    port: int | None = None
    scheme: str = "oci"

    @classmethod
    def parse(cls, text: str) -> RegistryAddress:
        """Parse ``oci://host[:port]``.

        Raises:
            InvalidArgument: ``text`` is not of that form.
        """
        match = _REGISTRY.fullmatch(text.rstrip("/"))
        port = int(match["port"]) if match and match["port"] else None
        if match is None or (port is not None and not 0 < port < 65536):
            raise InvalidArgument(
                f"'{text}' is not a registry address; write oci://host or oci://host:port (oci+http:// for plain HTTP)"
            )
        return cls(match["host"].lower(), port, match["scheme"])

    @property
    def netloc(self) -> str:
        """The host with its port, as in credential files."""
        return self.host if self.port is None else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL, such as ``https://registry.local:5000``."""
        netloc = self.netloc.replace(self.host, HUB[-1], 1) if self.host in HUB else self.netloc
        return f"{'http' if self._plain else 'https'}://{netloc}"

    @property
    def _plain(self) -> bool:
        return is_loopback(self.host) if self.scheme == "oci" else self.scheme == "oci+http"

    def may_lead_to(self, scheme: str, host: str, user: str = "") -> bool:
        """Return whether the registry may redirect a client, and its credentials, to a URL.

        Allowed are HTTPS, and plain HTTP if it is in use already; never a URL with a user name. A registry on this
        machine without an explicit ``oci+http`` may use plain HTTP to this machine only.

        Args:
            scheme: the URL's.
            host: its host, without port.
            user: its user name, or an empty string.
        """
        plain = self._plain and (self.scheme == "oci+http" or is_loopback(host))
        return bool(host) and not user and (scheme == "https" or (scheme == "http" and plain))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}"


@dataclass(frozen=True)
class Reference:
    """A parsed reference.

    Without a tag it means the highest version, or the only tag; without a variant, the archive's preferred one. Without
    a ``registry`` it refers to the local store.
    """

    name: str
    tag: str | None = None
    digest: str | None = None
    variant: str | None = None
    _: KW_ONLY
    registry: RegistryAddress | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse ``[oci://host[:port]/]name[:tag][@sha256:...][#variant]``; the name is converted to lower case.

        Raises:
            InvalidArgument: ``text`` is not of that form.
        """
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise InvalidArgument(
                f"'{text}' is not a model reference; write name:tag such as digits:1 "
                "(letters, digits and - _ . /), oci://host/name:tag, or ./file.ingot for a file"
            )
        registry = RegistryAddress.parse(match["registry"]) if match["registry"] else None
        name = stored_name(match["name"])
        tag = match["tag"] or ""
        if _ATTACHED.fullmatch(tag) or _ATTACHED_BY_COSIGN.fullmatch(tag):
            raise InvalidArgument(f"'{text}': tags of the form sha256-<hex> are reserved for signatures")
        return cls(name, match["tag"], match["digest"], match["variant"], registry=registry)

    @property
    def pushable(self) -> bool:
        """Whether an archive can be pushed to it: it has a name and a tag, and nothing else."""
        return self.tag is not None and self.digest is None and self.variant is None

    def __str__(self) -> str:
        registry = f"{self.registry}/" if self.registry else ""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        variant = f"#{self.variant}" if self.variant else ""
        return f"{registry}{self.name}{tag}{digest}{variant}"


def pulled_name(registry: RegistryAddress, name: str) -> str:
    """Return the name in the store of a registry's model: ``oci/registry.local__5000/team/digits``.

    It contains host and port, and hosts have no underscores, so names of two registries never collide.
    """
    port = registry.port or (80 if registry.url.startswith("http:") else 443)
    host = registry.host if re.fullmatch(_COMPONENT, registry.host) else f"x_{registry.host.encode().hex()}"
    return f"{PULLED}/{host}__{port}/{name}"


def is_tag(text: str) -> bool:
    """Return whether a text is a tag in OCI's grammar."""
    return _TAG.fullmatch(text) is not None


def attachments_tag(digest: str) -> str:
    """Return the tag of the index of an archive's attachments, as in OCI's referrers tag schema."""
    return digest.replace(":", "-", 1)


def is_attachments_tag(tag: str) -> bool:
    """Return whether a tag is of the form of :func:`attachments_tag`, which users do not see."""
    return _ATTACHED.fullmatch(tag) is not None


def is_version(tag: str) -> bool:
    """Return whether a tag is a version (a digit, or v and a digit, first), which never moves once pushed.

    All other tags are aliases.
    """
    return _VERSION.fullmatch(tag) is not None


def version_key(tag: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for version tags: 2 < 10, 1.9 < 1.10, 1.0-rc1 < 1.0.

    A part is (rank, number, text): numbers rank above words, and the end of a tag ranks between them.
    """
    parts = [
        (2, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in re.findall(r"\d+|[A-Za-z]+", tag.removeprefix("v"))
    ]
    return (*parts, (1, 0, ""))


def next_version(tags: Iterable[str]) -> str:
    """Return the lowest integer version above all of these tags."""
    highest = max((version_key(tag) for tag in tags if is_version(tag)), default=version_key("0"))
    whole = highest[0][1]
    return str(whole if version_key(str(whole)) > highest else whole + 1)


def alias_of(name: str, alias: str) -> Reference:
    """Return the reference of a model's tag.

    Raises:
        InvalidArgument: ``alias`` is not a tag.
    """
    try:
        ref = Reference.parse(f"{name}:{alias}")
    except InvalidArgument as error:
        raise InvalidArgument(f"'{alias}' is not a tag; write letters, digits and - _ . such as prod") from error
    if not ref.pushable:
        raise InvalidArgument(f"'{alias}' is not a tag; write letters, digits and - _ . such as prod")
    return ref


def choose(tags: Mapping[str, str], ref: Reference) -> str | None:
    """Return the tag that a reference names among a model's tags (tag -> digest), or None.

    Raises:
        NotFound: it has no tag, and there are several tags without a version.
    """
    if ref.tag is not None:
        tag = ref.tag
    elif ref.digest is not None:
        named = [tag for tag, digest in tags.items() if digest == ref.digest]
        tag = min(named, key=lambda tag: not is_version(tag), default="")
    else:
        tag = latest(tags, ref) if tags else ""
    return tag if tag in tags and ref.digest in (None, tags[tag]) else None


def latest(tags: Iterable[str], ref: Reference) -> str:
    """Return the tag of a reference without one: the highest version, else the only tag.

    Args:
        tags: the model's, one or more.
        ref: the reference, for the message.

    Raises:
        NotFound: there are several tags without a version; aliases are not guessed.
    """
    tags = list(tags)
    versions = [tag for tag in tags if is_version(tag)]
    if not versions and len(tags) > 1:
        raise NotFound(f"'{ref}' has no version; name one of its tags: {some(tags)}")
    return max(versions, key=version_key) if versions else tags[0]


def moved(ref: Reference, there: str) -> str:
    """Return a message that a tag differs from a reference, with the remedy.

    Args:
        ref: with tag and digest.
        there: the digest of the tag.
    """
    return f"'{ref.name}:{ref.tag}' is {there} now; a digest without a tag is independent of tags"


def some(tags: Iterable[str]) -> str:
    """Return tags for a message: the first ones, and the number of the others."""
    tags = list(tags)
    return ", ".join(tags[:_SHOWN]) + (f" and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else "")


def valid_name(text: str) -> str:
    """Return ``text`` if it is a valid model name.

    Raises:
        InvalidArgument: it is not; the message lists the allowed characters.
    """
    if _NAME.fullmatch(text) is None:
        raise InvalidArgument(
            f"'{text}' cannot name a model; use lower-case letters and digits, with single - _ . / between them"
        )
    for component in text.split("/"):
        if component in _RESERVED:
            raise InvalidArgument(f"'{text}' cannot name a model: '{component}' is a reserved file name in the store")
    return text


def stored_name(text: str) -> str:
    """Return the name of a model in stores, registries, signatures and policies, which is in lower case.

    Raises:
        InvalidArgument: ``text`` is not a valid name, not even in lower case.
    """
    return valid_name(text.lower() if _WRITTEN.fullmatch(text) else text)


def written_name(reference: str) -> str:
    """Return the name in a reference with its original case; empty if it is not a reference."""
    match = _REFERENCE.fullmatch(reference)
    return match["name"] if match else ""


def served_name_from(text: str) -> str:
    """Return the served name of a file: its name, with ``-`` for characters that are not allowed."""
    return text if _WRITTEN.fullmatch(text) else re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "model"


def name_from(text: str) -> str:
    """Return the model name closest to an identifier, file or folder name: ``MyNet`` becomes ``mynet``."""
    return served_name_from(text).lower()
