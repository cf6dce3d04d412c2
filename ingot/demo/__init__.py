"""The models that ``ingot demo`` trains, on data that installed packages hold.

``digits`` is the one that the demo takes all the way; ``examples/digits.py`` is the same by hand. ``pictures`` is the
same model on files of pictures, and ``docstrings`` a classifier of texts.
"""

from ingot.demo.digits import INPUT, Data, Digits, load, predict, train

__all__ = ["INPUT", "Data", "Digits", "load", "predict", "train"]
