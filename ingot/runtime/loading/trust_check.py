"""The check of every model against the trust policy, before any of it is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.errors import Untrusted
from ingot.model_store import Archive, BlobFolder, Reference, Variant
from ingot.model_store.blobs.blobs import chunks
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.transfer import Transfer
from ingot.runtime.machine import devices
from ingot.runtime.metrics import Metrics
from ingot.runtime.settings.settings import Settings

if TYPE_CHECKING:
    from ingot.model_store.trust.policy import Policy, Verdict

log = logging.getLogger(__name__)

_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class ServingTerms:
    """The terms on which a model is served.

    ``settings`` are the model's own, ``properties`` are reported to clients, ``variants`` are those of the archive with
    their evidence, as JSON has them, and ``check`` is called once before loading.
    """

    settings: Settings
    properties: Mapping[str, str] = field(default_factory=dict)
    variants: Sequence[Mapping[str, Any]] = ()
    check: Callable[[], None] = lambda: None


class TrustCheck:
    """Admits models that a policy trusts.

    Args:
        policy: whose signatures are accepted; None admits everything.
        settings: how models without their own settings are run.
        metrics: where checks are counted.
    """

    def __init__(self, policy: Policy | None, settings: Settings, metrics: Metrics):
        self._policy = policy
        self.settings = settings
        self._checks = metrics.signature_checks

    def admit(
        self,
        archive: Archive,
        reference: Reference,
        served: tuple[str, str],
        *,
        file: str = "",
        settings: Settings | None = None,
    ) -> ServingTerms:
        """Check an archive against the policy. Its signatures are read now, its blobs when the model is loaded.

        Args:
            archive: the archive, not unpacked if it is a file.
            reference: what it was found as, with the variant if one was named. Without tag and registry it is the
                archive's own name.
            served: the model's name and version for clients.
            file: the archive file, for messages.
            settings: the model's own, instead of those of every model.

        Raises:
            Untrusted: the policy does not trust it.
        """
        settings = settings or self.settings
        properties, variants = {"digest": archive.digest}, [_described(variant) for variant in archive.variants]
        if self._policy is None:
            return self._unchecked(served, properties, settings, variants)
        verdict = self._judge(self._check(self._policy, archive, reference, served[0], file), served)
        if verdict.signed_by:
            properties["signed_by"] = verdict.signed_by
        # No signature covers the derived cache: anyone who can write to the store could place another model there.
        allow_code = settings.allow_code or verdict.allow_code
        settings = replace(settings, allow_code=allow_code, derived_cache=False)
        if not isinstance(archive.blobs, BlobFolder):  # its digests are checked while it is unpacked
            return ServingTerms(settings, properties, variants)
        check = partial(check_blobs, archive, reference.variant, served[0])
        return ServingTerms(settings, properties, variants, check)

    @property
    def guarded(self) -> bool:
        """Whether there is a policy."""
        return self._policy is not None

    def check(self, archive: Archive, reference: Reference) -> None:
        """Check an archive against the policy before it is downloaded.

        Raises:
            Untrusted: the policy does not trust it.
        """
        if self._policy is not None:
            self._policy.check(archive, reference)

    def admit_file(self, path: Path, served: tuple[str, str], settings: Settings | None = None) -> ServingTerms:
        """Check a bare ``.onnx`` file, which carries no signature, against the policy; arguments as for :meth:`admit`.

        Raises:
            Untrusted: the policy requires a signature for models of this name.
        """
        settings = settings or self.settings
        if self._policy is None:
            return self._unchecked(served, {}, settings, ())
        policy = self._policy
        self._judge(lambda: policy.check_bare(served[0], path), served)
        return ServingTerms(settings)

    def _unchecked(
        self,
        served: tuple[str, str],
        properties: Mapping[str, str],
        settings: Settings,
        variants: Sequence[Mapping[str, Any]],
    ) -> ServingTerms:
        self._checks.labels(*served, "unchecked").inc()
        return ServingTerms(settings, properties, variants)

    @staticmethod
    def _check(policy: Policy, archive: Archive, found: Reference, name: str, file: str) -> Callable[[], Verdict]:
        if found.tag is None and found.registry is None:
            return lambda: policy.check_self_named(archive, name, file=file)
        return lambda: policy.check(archive, found)

    def _judge(self, check: Callable[[], Verdict], served: tuple[str, str]) -> Verdict:
        try:
            verdict = check()
        except Untrusted:
            self._checks.labels(*served, "refused").inc()
            raise
        self._checks.labels(*served, verdict.result).inc()
        if verdict.signed_by:
            log.info("model %s version %s is signed by %s, which the trust policy accepts", *served, verdict.signed_by)
        else:
            log.warning("model %s version %s %s, which the trust policy allows", *served, _DESCRIPTIONS[verdict.result])
        return verdict


_DESCRIPTIONS = {
    "unsigned": "is unsigned",
    "untrusted": "is not signed by an accepted key",
    "invalid": "has an invalid signature",
}


def check_blobs(archive: Archive, variant: str | None, model: str) -> None:
    """Read a model's blobs and compare them with their digests, and so with what was signed.

    Args:
        archive: an unpacked archive.
        variant: the only variant to read; None reads all.
        model: its name in the log.

    Raises:
        InvalidArchive: a blob is missing or damaged, or a graph refers to a blob that is not its own.
    """
    began = reported = time.monotonic()

    def report(transfer: Transfer) -> None:
        nonlocal reported
        if (now := time.monotonic()) - reported >= _REPORT_SECONDS:
            reported = now
            log.info("model %s: verified %.0f of %.0f MB", model, transfer.moved / 1e6, transfer.total / 1e6)

    wanted = archive.variants if variant is None else (archive.variant(variant),)
    for item in wanted:
        item.check_own()
    layers = {layer.digest: layer for item in wanted for layer in item.manifest.layers}
    transfer = Transfer(report)
    transfer.expect(sum(layer.size for layer in layers.values()))

    def read(layer: Descriptor) -> None:
        for chunk in chunks(archive.blobs, layer):
            transfer.advance(len(chunk))

    # Hashing takes most of the time and releases the interpreter lock.
    transfer.each(read, sorted(layers.values(), key=lambda item: -item.size), min(8, devices.cpu_count()))
    log.info(
        "model %s: verified the digests of its %.1f MB (%.2f s)", model, transfer.total / 1e6, time.monotonic() - began
    )


def _described(variant: Variant) -> dict[str, Any]:
    """Return the properties of a variant that clients see, from its archive.

    ``error`` is the largest relative error of an output compared with the source; ``latency`` is in seconds by rows, on
    the machine that made the archive; ``metric`` is that of the task.
    """
    serving, evidence = variant.serving, variant.serving.evidence
    metric = evidence.metric
    return {
        "name": variant.name,
        "format": serving.format,
        "precision": serving.precision,
        "size": variant.size,
        "error": max((item.error for item in evidence.parity), default=None),
        "latency": {str(item.rows): item.seconds for item in evidence.latency},
        "metric": None
        if metric is None
        else {
            "name": metric.name,
            "before": metric.before.value,
            "after": metric.after.value,
            "drop": metric.drop.value,
            "budget": metric.budget,
        },
    }
