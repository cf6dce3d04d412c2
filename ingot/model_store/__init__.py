"""Archives (OCI artifacts), and the store and registries that hold them; independent of torch, engines and the web.

Start in format/archive.py for the archive, store/store.py for the local store, references.py for
names of both, and places.py for both kinds of places.
"""

from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.evidence import (
    Agreement,
    BatchLatency,
    BoundsEvidence,
    CallBytes,
    Evidence,
    MemoryEvidence,
    ParityEvidence,
    Provenance,
)
from ingot.model_store.format.generation import Generation, SamplingDefaults
from ingot.model_store.format.goldens import Golden
from ingot.model_store.format.manifest import Serving, ServingDefaults
from ingot.model_store.format.variant import Variant, add_variant
from ingot.model_store.references import Reference, RegistryAddress
from ingot.model_store.store.derived import CacheEntry, DerivedCache
from ingot.model_store.store.store import Store

__all__ = [
    "Agreement",
    "Archive",
    "BatchLatency",
    "BlobFolder",
    "BoundsEvidence",
    "CacheEntry",
    "CallBytes",
    "DerivedCache",
    "Descriptor",
    "Evidence",
    "Generation",
    "Golden",
    "MemoryEvidence",
    "ParityEvidence",
    "Provenance",
    "Reference",
    "RegistryAddress",
    "SamplingDefaults",
    "Serving",
    "ServingDefaults",
    "Store",
    "Transfer",
    "Variant",
    "add_variant",
]
