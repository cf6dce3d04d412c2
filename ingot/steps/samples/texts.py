"""Texts on which a stored tokenizer must give the same tokens as the original, and texts with answers to compare."""

from __future__ import annotations

import numpy as np

from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes

_HARD = (
    "",
    " ",
    "\t\n\r  x \u00a0 y\u2003z",
    "a fine film",
    "It's 3.14, isn't it? -- no... (well) [MASK] [SEP] <s> </s> <pad> <|endoftext|>",
    "http://example.org/a?b=c&d=%20#e user@example.org @handle #tag",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u212b \ufb01sh stra\u00dfe \u1e9e",
    "Z\u0335\u0321a\u0316\u0317l\u0318\u0319g\u031co\u0320 \u0301\u0301\u0301",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\u2764\ufe0f \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u6771\u4eac\u90fd \ud55c\uad6d\uc5b4 \u3053\u3093\u306b\u3061\u306f "
    "\uff76\uff9e\uff77\uff9e \U00020000",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u200f(x)\u200e",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1780\u17d2\u1798\u17c2\u179a",
    "\x00\x01\x07\x1b[0m\x7f\x85\u2028\u2029\ufeff\ufffd\ufffe",
    "x" * 250,
    "supercalifragilisticexpialidocious" * 12,
    "1234567890" * 40,
    "\u2211\u222b\u221a\u2260\u2264 \u00b2\u00b3\u2075 \u2160\u2161 \u00bd \U0001d54f\U0001d4d0",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x ** 2}  # \u00a9",
    "tab\tseparated\tvalues\r\nand lines\n\n\nwith blanks   ",
    "DON'T SHOUT. \u0130stanbul \u0131 \u01c6 \u03a3\u03ac\u03c2",
    "\u00ad\u200b\u200c\u200d\u2060soft",
    "word " * 700,
)
_WORDS = [
    "a",
    "the",
    "film",
    "story",
    "cast",
    "music",
    "ending",
    "was",
    "is",
    "never",
    "really",
    "quite",
    "fine",
    "dull",
    "bright",
    "slow",
    "tender",
    "loud",
    "and",
    "but",
    "because",
    "with",
    "without",
    "of",
    "nothing",
    "everything",
    "twice",
    "again",
    "today",
    "we",
    "they",
    "nobody",
    "expected",
    "laughed",
    "slept",
    "walked",
    "out",
]
_SAMPLES = 64


def hard() -> list[str]:
    """Return the hard texts: each alone, doubled, between words, and in the other case, and next to another one."""
    texts = [form for text in _HARD for form in (text, text + text, f"we {text} out", text.upper(), text.lower())]
    texts += [text[::-1] for text in _HARD]
    texts += [f"{one} {other}" for one in _HARD[:12] for other in _HARD[5:20]]
    return texts


def samples() -> list[str]:
    """Return texts of different lengths that every tokenizer can read."""
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(_WORDS, size)) for size in generator.integers(1, 40, _SAMPLES)]


def sets(texts: list[str], text: str, pair: str, *, required: bool) -> list[dict[str, Array]]:
    """Return sets of raw inputs: the texts alone unless pairs are required, and in pairs if ``pair`` has a name."""
    alone = as_array(texts)
    both = {text: alone, pair: alone[::-1]}
    return [both] if pair and required else [{text: alone}, *([both] if pair else [])]


def as_array(texts: list[str]) -> Array:
    """Return texts as a BYTES tensor."""
    return as_bytes([text.encode() for text in texts])
