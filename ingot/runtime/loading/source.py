"""The file, variant or archive that a model serves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ingot.model_store import Archive, Generation, Serving, ServingDefaults, Variant
from ingot.runtime.generation.requests import SIGNATURE
from ingot.runtime.loading.choice import Choose, Chooser, Reason, single_variant, warn_of
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.settings.settings import Settings
from ingot.steps import Steps
from ingot.tensors import Signature


@dataclass(frozen=True)
class ModelSource:
    """The source of a model, which is opened when the model is loaded.

    Args:
        choose: opens the variant or file to serve.
        signature: the contract for requests; None uses the engine's own reading of the file.
        defaults: settings of the archive, where the server's have none.
        steps: those around the graph, if there are any.
        generation: how a decoder is run, if it is one.
    """

    choose: Choose
    signature: Signature | None = None
    defaults: ServingDefaults | None = None
    steps: Steps | None = None
    generation: Generation | None = None

    @classmethod
    def of_file(cls, path: Path, settings: Settings, model: str) -> ModelSource:
        """Return the source of a bare ``.onnx`` file.

        Args:
            path: the file.
            settings: how the model is run.
            model: its name in messages.
        """
        return cls(single_variant(LoadSpec.of_file(path, settings), settings, model=model))

    @classmethod
    def of_class(cls, path: Path, settings: Settings, model: str) -> ModelSource:
        """Return the source of a class in Python, as ``model.py:Model``; see :meth:`of_file`."""
        return cls(single_variant(LoadSpec.of_class(path, settings), settings, model=model))

    @classmethod
    def of_variant(cls, variant: Variant, settings: Settings, model: str, reason: Reason = "requested") -> ModelSource:
        """Return the source of one variant of an unpacked archive; see :meth:`of_file`."""
        warn_of(variant, model, settings)
        choose = single_variant(LoadSpec.of_variant(variant, settings), settings, reason, model)
        return cls._of_serving(choose, variant.serving)

    @classmethod
    def of_archive(cls, archive: Archive, settings: Settings, model: str) -> ModelSource:
        """Return the source of the best variant of an unpacked archive for this machine; see :meth:`of_file`."""
        if len(archive.variants) == 1:
            return cls.of_variant(archive.variant(), settings, model, "only")
        choose = Chooser(model, archive.variants, settings)
        return cls._of_serving(choose, archive.variants[0].serving)

    @classmethod
    def _of_serving(cls, choose: Choose, serving: Serving) -> ModelSource:
        # Clients of a decoder send prompts, not the inputs of its graph.
        signature = serving.signature if serving.generation is None else SIGNATURE
        return cls(choose, signature, serving.defaults, serving.steps, serving.generation)
