"""What a server serves of registries: copies in its store, under names that no user gives."""

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
from ingot.runtime.loading.admission import Gate

log = logging.getLogger(__name__)

Transferring = Callable[[str], AbstractContextManager[Transfer]]
"""Shows the progress of what its title says."""

_REPORT_SECONDS = 5.0


@contextmanager
def logged(title: str) -> Iterator[Transfer]:
    """Yield a transfer that tells the log every few seconds how far it is."""
    told = time.monotonic()

    def report(transfer: Transfer) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= _REPORT_SECONDS:
            told = now
            log.info("%s: %.0f of %.0f MB", title, transfer.done / 1e6, transfer.total / 1e6)

    log.info("%s", title)
    yield Transfer(report)


class Downloads:
    """Brings archives of registries into a store, where engines can map their files.

    What is pulled is kept as :func:`~ingot.model_store.references.pulled_name` says, so that the user's own names stay
    as they are and registries do not get in each other's way.

    Args:
        store: where to.
        gate: what it does not let in is not pulled.
        transferring: shows the progress.
    """

    def __init__(self, store: Store, gate: Gate, transferring: Transferring):
        self._store = store
        self._gate = gate
        self._transferring = transferring

    def pull(self, located: Located) -> tuple[Archive, Reference]:
        """Return an archive of a registry from the store, and the registry's reference to it.

        Where the registry cannot be reached, a version or a digest is what an earlier pull brought: neither can have
        become another archive.

        Raises:
            NotFound: the registry has no such thing.
            Untrusted: the trust policy does not let it in.
            AlreadyExists: the registry has another archive under a version than at an earlier pull.
            Unavailable: the registry cannot be reached, and the store has no copy that must be the same.
        """
        reference = located.reference
        if reference is None or reference.registry is None:
            raise InvalidArgument(f"'{located.name}' is in no registry")
        kept = pulled_name(reference.registry, reference.name)
        try:
            archive, found = located.find()
        except Unavailable as error:
            return self._kept(reference, reference.registry, kept, error)
        self._gate.check(archive, found)
        if found.tag is None:
            raise InvalidArgument(
                f"no tag points to '{found}'; promote it to one, or pull it and serve it from the store"
            )
        there = self._store.digest_of(kept, found.tag)
        if there not in (None, archive.digest) and is_version(found.tag):
            raise AlreadyExists(
                f"'{found}' was {there} at an earlier pull, and a version never changes; find out who changed it "
                f"there, or serve what it was: ingot serve {kept}:{found.tag}"
            )
        with self._transferring(f"Pulling {found.registry}/{found.name}:{found.tag}") as transfer:
            # With a policy, blobs that are here already are read when the model is loaded: better mended than refused.
            recheck, target = self._gate.guarded, Reference(kept, found.tag)
            pushed = self._store.push(archive, target, expect=ANY, transfer=transfer, recheck=recheck)
        return self._store.get(pushed), found

    def _kept(
        self, wanted: Reference, registry: RegistryAddress, kept: str, error: Unavailable
    ) -> tuple[Archive, Reference]:
        """Return what an earlier pull brought, if it cannot be another archive now."""
        tag = None if wanted.digest else wanted.tag
        try:
            archive, found = self._store.find(Reference(kept, tag, wanted.digest))
        except NotFound:
            raise error from None
        copy = f"{kept}:{found.tag}"
        if wanted.digest is None and (wanted.tag is None or not is_version(wanted.tag)):
            raise Unavailable(
                f"{error}; the store has what '{wanted}' was at an earlier pull, and ingot serve {copy} serves that"
            ) from error
        log.warning("%s; serving %s, which is the same, from the store", error, copy)
        return archive, Reference(
            wanted.name, wanted.tag or found.tag, archive.digest, wanted.variant, registry=registry
        )
