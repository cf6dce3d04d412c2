"""How many characters a normalizer of Hugging Face's ``tokenizers`` may make of one: a bound, from its serialization.

Text is measured by its compatibility decomposition (NFKD), in which every Unicode form of it has the same length.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

# One character decomposes to 18 at most, and canonically to 4. Later forms of the same text add nothing.
_FORMS = {"NFKD": 18, "NFKC": 18, "NFD": 4, "NFC": 4, "BertNormalizer": 4}
# Spaces around a Chinese character; up to 4 bytes of a character, each a character that decomposes to 2.
_CONSTANT = {"BertNormalizer": 3.0, "ByteLevel": 8.0}

# Expressions that match one character or more: a character or a class, perhaps several times.
_CONSUMES = re.compile(r"(\[[^\[\]]+\]|\\[nrtsdw]|[^\\^$.|?*+(){}\[\]])(\+|\{[1-9]\d*,?\})?")


def growth(declared: Mapping[str, Any] | None) -> tuple[float, str]:
    """Return a bound of the characters that become of one, and the part that contributes most.

    Args:
        declared: the normalizer or the decoder of a ``tokenizer.json``; None without one.
    """
    parts = [*_parts(declared)]
    total, worst = 1.0, (1.0, "")
    for part in parts:
        factor = _factor(part)
        total, worst = total * factor, max(worst, (factor, _named(part)))
    kinds = {str(part["type"]) for part in parts}
    # A map of a Precompiled is itself a form of Unicode, and its strings are counted.
    form = 1 if "Precompiled" in kinds else max((_FORMS.get(kind, 1) for kind in kinds), default=1)
    return total * form, worst[1]


def _parts(declared: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of nested sequences, each without others inside."""
    if declared is None:
        return
    if declared["type"] != "Sequence":
        yield declared
    for part in declared.get("normalizers", declared.get("decoders", ())):
        yield from _parts(part)


def _factor(part: Mapping[str, Any]) -> float:
    match part["type"]:
        case "Replace":
            return _replaced(part["pattern"], _size(part["content"]))
        case "Prepend":
            return 1.0 + _size(part["prepend"])
        case "Precompiled":
            return float(max(1, _longest(part.get("precompiled_charsmap") or "")))
    return _CONSTANT.get(part["type"], 1.0)


def _replaced(pattern: Mapping[str, str], size: int) -> float:
    if "String" in pattern:
        return max(1.0, size / max(1, _size(pattern["String"])))
    if _CONSUMES.fullmatch(pattern["Regex"]):
        return float(max(1, size))
    return 1.0 + size  # it may match between all characters


def _longest(encoded: str) -> int:
    """Return the size of the longest string of sentencepiece's map: a trie after its size, and strings."""
    content = base64.b64decode(encoded)
    strings = content[4 + int.from_bytes(content[:4], "little") :]
    return max(_size(each.decode(errors="replace")) for each in strings.split(b"\0"))


def _size(text: str) -> int:
    return len(unicodedata.normalize("NFKD", text))


def _named(part: Mapping[str, Any]) -> str:
    shown = part.get("pattern", part.get("prepend"))
    return str(part["type"]) if shown is None else f"{part['type']} {str(shown)[:40]}"
