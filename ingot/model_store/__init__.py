"""Archives (OCI artifacts), and the store and registries that hold them; independent of torch, engines and the web.

Start in format/archive.py for the archive, store/store.py for the local store, and places.py for both kinds of places.
"""

from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.evidence import (
    BatchLatency,
    BoundsEvidence,
    CallBytes,
    Evidence,
    MemoryEvidence,
    ParityEvidence,
    Provenance,
)
from ingot.model_store.format.goldens import Golden
from ingot.model_store.format.manifest import Serving, ServingDefaults
from ingot.model_store.format.variant import Variant, add_variant
from ingot.model_store.references import Reference
from ingot.model_store.store.store import Store

__all__ = [
    "Archive",
    "BatchLatency",
    "BlobFolder",
    "BoundsEvidence",
    "CallBytes",
    "Evidence",
    "Golden",
    "MemoryEvidence",
    "ParityEvidence",
    "Provenance",
    "Reference",
    "Serving",
    "ServingDefaults",
    "Store",
    "Variant",
    "add_variant",
]
