"""Convert models of other servers (TorchServe archives, Triton repositories) and ONNX files into archives.

The readers only read data: they run no code of a model, and write no file under a name from the source. The models
that they find are then exported, which imports PyTorch. Start reading at ``pipeline.import_model``.
"""

from ingot.importing.pipeline import Prove, convert, import_model
from ingot.importing.record import Candidate, Consent, Imported
from ingot.importing.sources import candidates

__all__ = ["Candidate", "Consent", "Imported", "Prove", "candidates", "convert", "import_model"]
