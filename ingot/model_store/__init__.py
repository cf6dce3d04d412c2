"""Archives (OCI artifacts) and the store that holds them. Knows nothing of torch, engines or the web."""

from ingot.model_store.archive import Archive
from ingot.model_store.blob_folder import BlobFolder
from ingot.model_store.evidence import BatchLatency, Evidence, ParityEvidence, Provenance
from ingot.model_store.goldens import Golden
from ingot.model_store.manifest import Serving
from ingot.model_store.references import Reference
from ingot.model_store.store import Store
from ingot.model_store.variant import Variant, add_variant

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
