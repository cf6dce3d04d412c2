"""Loading models and answering requests in batches; independent of protocols, and of torch outside engines/.

Start in model.py: loading/ prepares a model, dispatch/ and scheduling/ batch its requests, engines/ run them.
"""

from ingot.runtime.dispatch.acceptor import State
from ingot.runtime.dispatch.batch_run import BatchRunner
from ingot.runtime.dispatch.pending import Submitted
from ingot.runtime.dispatch.signature_check import CheckedInputs
from ingot.runtime.engines.engine import BaseEngine, Capabilities, Engine
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.loading.choice import single_variant
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.loading.source import ModelSource
from ingot.runtime.loading.trust_check import ServingTerms
from ingot.runtime.metrics import Metrics
from ingot.runtime.model import Model
from ingot.runtime.scheduling.entry import Entry, Outcome, Request
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.settings.settings import Settings

__all__ = [
    "BaseEngine",
    "BatchRunner",
    "Capabilities",
    "CheckedInputs",
    "Engine",
    "EngineSpec",
    "Entry",
    "Latency",
    "Limits",
    "LoadSpec",
    "Metrics",
    "Model",
    "ModelSource",
    "Outcome",
    "Request",
    "Scheduler",
    "ServingTerms",
    "Settings",
    "State",
    "Submitted",
    "load_engine",
    "single_variant",
]
