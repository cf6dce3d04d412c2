"""Models of registries: copies in the local store, under reserved names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ingot.errors import AlreadyExists, InvalidArgument, NotFound, Unavailable
from ingot.model_store import Archive, Reference, Store
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.places import Located
from ingot.model_store.references import RegistryAddress, is_version, pulled_name
from ingot.model_store.store.tags import ANY
from ingot.runtime.loading.trust_check import TrustCheck

log = logging.getLogger(__name__)

Transferring = Callable[[str], AbstractContextManager[Transfer]]
"""Displays the progress of a transfer under a title."""

_REPORT_SECONDS = 5.0


@contextmanager
def logged(title: str) -> Iterator[Transfer]:
    """Yield a transfer that logs its progress every few seconds."""
    reported = time.monotonic()

    def report(transfer: Transfer) -> None:
        nonlocal reported
        if (now := time.monotonic()) - reported >= _REPORT_SECONDS:
            reported = now
            log.info("%s: %.0f of %.0f MB", title, transfer.done / 1e6, transfer.total / 1e6)

    log.info("%s", title)
    yield Transfer(report)


class Downloads:
    """Copies archives of registries into a store, where engines can map their files.

    Copies are named by :func:`~ingot.model_store.references.pulled_name`, so that they collide neither with the user's
    names nor with each other's registries.

    Args:
        store: the destination.
        gate: archives that it rejects are not downloaded.
        transferring: displays the progress.
    """

    def __init__(self, store: Store, trust: TrustCheck, transferring: Transferring):
        self._store = store
        self._trust = trust
        self._transferring = transferring

    def pull(self, located: Located) -> tuple[Archive, Reference]:
        """Return a registry's archive from the store, and the registry's reference to it.

        If the registry cannot be reached, a version or digest resolves to the copy of an earlier pull, as neither can
        have changed.

        Raises:
            NotFound: the registry has no such archive.
            Untrusted: the trust policy rejects it.
            AlreadyExists: the version holds another archive in the registry than at an earlier pull.
            Unavailable: the registry cannot be reached, and the store has no copy that is certain to be the same.
        """
        reference = located.reference
        if reference is None or reference.registry is None:
            raise InvalidArgument(f"'{located.name}' is not a reference to a registry")
        kept = pulled_name(reference.registry, reference.name)
        try:
            archive, found = located.find()
        except Unavailable as error:
            return self._kept(reference, reference.registry, kept, error)
        self._trust.check(archive, found)
        if found.tag is None:
            raise InvalidArgument(
                f"no tag points to '{found}'; promote it to one, or copy it to the store and serve it from there"
            )
        there = self._store.digest_of(kept, found.tag)
        if there not in (None, archive.digest) and is_version(found.tag):
            raise AlreadyExists(
                f"'{found}' was {there} at an earlier pull, and a version never changes; find out who changed it "
                f"there, or serve the earlier archive: ingot serve {kept}:{found.tag}"
            )
        with self._transferring(f"Pulling {found.registry}/{found.name}:{found.tag}") as transfer:
            # With a policy, existing blobs are read when the model is loaded: repair damaged ones instead of refusing
            # them.
            recheck, target = self._trust.guarded, Reference(kept, found.tag)
            pushed = self._store.push(archive, target, expect=ANY, transfer=transfer, recheck=recheck)
        return self._store.get(pushed), found

    def _kept(
        self, wanted: Reference, registry: RegistryAddress, kept: str, error: Unavailable
    ) -> tuple[Archive, Reference]:
        """Return the copy of an earlier pull if the reference cannot mean another archive now."""
        tag = None if wanted.digest else wanted.tag
        try:
            archive, found = self._store.find(Reference(kept, tag, wanted.digest))
        except NotFound:
            raise error from None
        copy = f"{kept}:{found.tag}"
        if wanted.digest is None and (wanted.tag is None or not is_version(wanted.tag)):
            raise Unavailable(
                f"{error}; the store has the archive that '{wanted}' was at an earlier pull: ingot serve {copy}"
            ) from error
        log.warning("%s; serving %s, which is the same, from the store", error, copy)
        return archive, Reference(
            wanted.name, wanted.tag or found.tag, archive.digest, wanted.variant, registry=registry
        )
