"""The models of a deployment: what a user names, as servers elsewhere find it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from ingot.deploy.plan import Served
from ingot.errors import InvalidArgument
from ingot.model_store import Reference, Store
from ingot.model_store.places import Located, locate, split_name
from ingot.model_store.references import is_version, written_name


def resolve(
    texts: Iterable[str], registry: str | None, store: Path | None, *, shared: bool = False
) -> tuple[Served, ...]:
    """Return the models that a user names, with their digests.

    Args:
        texts: references, each with or without ``NAME=`` and ``#variant``.
        registry: where references to the store are found by servers: ``oci://host/team``.
        store: the store; None for the user's.
        shared: whether servers may read the store of this machine, and follow aliases.

    Raises:
        NotFound: there is no such archive.
        InvalidArgument: servers could not find one, or two have the same name.
    """
    here = Store(store)
    found = tuple(_model(text, registry, here, shared=shared) for text in texts)
    names = [model.name for model in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"two models are called '{name}'; rename one: NAME=SOURCE")
    return found


def _model(text: str, registry: str | None, store: Store, *, shared: bool) -> Served:
    name, source = split_name(text)
    located = locate(source, store)
    servers = "replicas" if shared else "pods"
    if located.reference is None:
        raise InvalidArgument(
            f"{servers} cannot read the file {source}; copy it to a registry: ingot copy {source} oci://HOST/NAME:TAG"
        )
    archive, found = located.find()
    alias = found.tag if shared and found.tag and located.reference.digest is None else ""
    alias = "" if is_version(alias) else alias
    tag = alias or _version(located, found, source)
    reference = dataclasses.replace(found, tag=tag, variant=located.variant)
    if reference.registry is None and registry is not None:
        base = Reference.parse(f"{registry.rstrip('/')}/{reference.name}")
        if base.registry is None:
            raise InvalidArgument(f"--registry {registry} is not the address of a registry; write oci://host/team")
        reference = dataclasses.replace(base, tag=tag, variant=reference.variant)
    elif reference.registry is None and not shared:
        raise InvalidArgument(
            f"pods cannot read the store of this machine; copy the archive to a registry (ingot copy {source} "
            f"oci://HOST/{source}), and name that or its place with --registry"
        )
    return Served.of(name or written_name(str(reference)).rpartition("/")[2], reference, archive, alias)


def _version(located: Located, found: Reference, source: str) -> str:
    """Return the version of an archive: servers that start after an alias has moved find it by that.

    Raises:
        InvalidArgument: it has none.
    """
    if found.tag is not None and is_version(found.tag):
        return found.tag
    tags = located.place.tags(found.name) if located.place is not None else {}
    versions = [tag for tag, digest in tags.items() if digest == found.digest and is_version(tag)]
    if not versions:
        raise InvalidArgument(
            f"'{source}' has no version, so that servers could not find it once its alias has moved; "
            f"ingot store promote {source} 1 gives it one"
        )
    return versions[0]
