"""Loading models and answering requests in batches; independent of protocols, and of torch outside engines/.

Start in model.py: loading/ prepares a model, dispatch/ and scheduling/ batch its requests, engines/ run them.
"""

from ingot.runtime.dispatch.acceptor import State
from ingot.runtime.dispatch.pending import Cancellable
from ingot.runtime.dispatch.signature_check import CheckedInputs
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.scheduling.entry import Entry, Request
from ingot.runtime.scheduling.scheduler import Limits, Scheduler
from ingot.runtime.settings.settings import Settings

__all__ = [
    "Cancellable",
    "CheckedInputs",
    "Engine",
    "EngineSpec",
    "Entry",
    "Limits",
    "Metrics",
    "Model",
    "Request",
    "Scheduler",
    "Settings",
    "State",
    "load_engine",
]
