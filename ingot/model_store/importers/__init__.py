"""Readers of what other servers keep models in: TorchServe's archives and Triton's repositories.

They read data only: no code of a model is run, and nothing is written under a name that stands in a file.
"""

from ingot.model_store.importers.candidates import candidates
from ingot.model_store.importers.carry import carry
from ingot.model_store.importers.declared import Declared, specs
from ingot.model_store.importers.record import Candidate, Consent, Imported

__all__ = ["Candidate", "Consent", "Declared", "Imported", "candidates", "carry", "specs"]
