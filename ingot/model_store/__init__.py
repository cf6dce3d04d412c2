"""Archives (OCI artifacts) and the store that holds them. Knows nothing of torch, engines or the web."""

from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.evidence import BatchLatency, Evidence, ParityEvidence, Provenance
from ingot.model_store.format.goldens import Golden
from ingot.model_store.format.manifest import Serving
from ingot.model_store.format.variant import Variant, add_variant
from ingot.model_store.references import Reference
from ingot.model_store.store.store import Store

__all__ = [
    "Archive",
    "BatchLatency",
    "BlobFolder",
    "Evidence",
    "Golden",
    "ParityEvidence",
    "Provenance",
    "Reference",
    "Serving",
    "Store",
    "Variant",
    "add_variant",
]
