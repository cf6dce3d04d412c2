"""Models of other servers, TorchServe's archives and Triton's repositories, and ONNX files, into archives.

The readers read data only: no code of a model is run, and nothing is written under a name that stands in a file. What
they find goes the way of every export; PyTorch is imported then, not before.
"""

from ingot.importing.pipeline import convert, import_model
from ingot.importing.record import Candidate, Consent, Imported
from ingot.importing.sources import candidates

__all__ = ["Candidate", "Consent", "Imported", "candidates", "convert", "import_model"]
