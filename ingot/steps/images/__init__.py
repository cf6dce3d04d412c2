"""Pictures: from the bytes of files to the values that a model was trained on.

``decoding`` reads files, ``operations`` and ``sizes`` are what is then done to pixels, ``image`` is the step of both.
``processors`` reads the operations from transformers' image processors, ``presets`` from timm and torchvision, and
``pictures`` draws the pictures on which an export proves them.
"""
