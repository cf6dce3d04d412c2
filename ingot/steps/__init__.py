"""Declared steps before and after a model's graph: from raw inputs, such as texts, to final answers.

Steps are data in ``serving.json``, and their files are blobs of the archive: an archive holds no code. One file holds
one kind, with its configuration (what ``serving.json`` has), and ``open``, which returns the function that runs:

======================  =============================================================================================
``tokenize``            texts, or pairs of texts, to ids of tokens, by Hugging Face's ``tokenizers``
``pool``                a vector for each token to one for each text, in all modes of sentence-transformers
``dense``               a linear layer with an activation on vectors
``normalize``           vectors of length 1
``classify``            logits to scores and the names of the best classes
======================  =============================================================================================

A new kind is a file here and an entry in :data:`ingot.steps.pipeline.AnyStep`. Steps pass values to each other by name:
each reads those that the request, earlier steps or the graph have made. Start in pipeline.py. text.py describes the
steps of the tasks on texts.
"""

from ingot.steps.pipeline import OpenedSteps, Steps, StepTime
from ingot.steps.step import Files, Step, Values
from ingot.steps.text import Described, Original, embedding, text_classification, text_ranking

__all__ = [
    "Described",
    "Files",
    "OpenedSteps",
    "Original",
    "Step",
    "StepTime",
    "Steps",
    "Values",
    "embedding",
    "text_classification",
    "text_ranking",
]
