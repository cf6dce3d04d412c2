"""Loading models and answering requests in batches. Knows nothing of protocols, and of torch only inside engines."""

from ingot.runtime.catalog import Catalog, Servable
from ingot.runtime.engine import Engine
from ingot.runtime.entry import Entry
from ingot.runtime.fits import Fit, Key, key_of
from ingot.runtime.loader import load_engine
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model, State
from ingot.runtime.repository import Repository
from ingot.runtime.scheduler import Limits, Scheduler
from ingot.runtime.settings import Settings
from ingot.runtime.submission import Cancellable

__all__ = [
    "Cancellable",
    "Catalog",
    "Engine",
    "Entry",
    "Fit",
    "Key",
    "Limits",
    "Metrics",
    "Model",
    "Repository",
    "Scheduler",
    "Servable",
    "Settings",
    "State",
    "key_of",
    "load_engine",
]
