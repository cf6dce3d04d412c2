"""Declared steps before and after a model's graph: from raw inputs, such as texts, to final answers.

Steps are data in ``serving.json``, and their files are blobs of the archive: an archive holds no code. One file holds
one kind, with its configuration (what ``serving.json`` has), and ``open``, which returns the function that runs:

======================  =============================================================================================
``tokenize``            texts, or pairs of texts, to ids of tokens, by Hugging Face's ``tokenizers``
``image``               files of pictures to the values of pixels (``images/``)
``audio``               files of sounds to samples or spectrograms (``sounds/``)
``bytes``               files of any kind to the bytes at their ends
``pool``                a vector for each token to one for each text, in all modes of sentence-transformers
``dense``               a linear layer with an activation on vectors
``normalize``           vectors of length 1
``classify``            logits to scores and the names of the best classes
``relabel``             names of classes to others, where a score is low or no model was needed
``entities``            logits of each token to named parts of a text
``span``                logits of first and last tokens to answers in a text
``fill``                logits of a masked token to the words that fit best
``vectors``             a vector for each token, without those of padding
``boxes``               outputs of a detector to boxes in the original picture
``masks``               classes of pixels to a mask of the original picture for each label
``segments``            queries of a segmentation to a mask of the original picture for each segment
``pixel_classes``       classes of pixels to the best class of each, and its score
``depth``               depths of pixels to those of the original picture, as numbers and as a picture
``text_boxes``          probabilities that pixels belong to a text to boxes of lines in the original picture
``ctc``                 scores of characters for each frame of a sound or a line of text to its text
======================  =============================================================================================

A new kind is a file here and an entry in :data:`ingot.steps.pipeline.AnyStep`. Steps pass values to each other by name:
each reads those that the request, earlier steps or the graph have made. Start in pipeline.py. ``tasks/``
describes the steps of tasks, and ``samples/`` has raw inputs on which they are proved.
"""

from ingot.steps.item import ItemStep
from ingot.steps.pipeline import AnyStep, OpenedSteps, Steps, StepTime
from ingot.steps.step import Apply, Files, Step, Values
from ingot.steps.tasks.described import Described, Original
from ingot.steps.tasks.file import file_classification
from ingot.steps.tasks.image import (
    depth_estimation,
    image_classification,
    image_feature_extraction,
    image_segmentation,
    object_detection,
)
from ingot.steps.tasks.ocr import image_to_text, text_detection
from ingot.steps.tasks.sound import audio_classification, speech_recognition
from ingot.steps.tasks.text import embedding, text_classification, text_ranking
from ingot.steps.tasks.tokens import feature_extraction, fill_mask, question_answering, token_classification

__all__ = [
    "AnyStep",
    "Apply",
    "Described",
    "Files",
    "ItemStep",
    "OpenedSteps",
    "Original",
    "Step",
    "StepTime",
    "Steps",
    "Values",
    "audio_classification",
    "depth_estimation",
    "embedding",
    "feature_extraction",
    "file_classification",
    "fill_mask",
    "image_classification",
    "image_feature_extraction",
    "image_segmentation",
    "image_to_text",
    "object_detection",
    "question_answering",
    "speech_recognition",
    "text_classification",
    "text_detection",
    "text_ranking",
    "token_classification",
]
