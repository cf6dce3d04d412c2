"""Causes of an exporter's errors, each in one sentence, with advice that does not depend on the user's code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

_LINE = re.compile(r"^\s*(\w+) = (.+?)\s*$", re.MULTILINE)
_DIM = re.compile(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+|oo))?\)")
_DERIVED = re.compile(r"(?:(\d+)\*)?(_\w+)(?: ([+-]) (\d+))?")
# PyTorch reports a dimension in steps as a multiple of ``<name>_part``.
_STEPPED = re.compile(r"You marked \d+\*(\w+)_part as dynamic but your code specialized it to be a constant \((\d+)\)")
_GUARD = re.compile(
    r"Not all values of (\w+) = (\S+) in the specified range.*? satisfy the generated guard (.*?)\.?$", re.MULTILINE
)
# The names of the modules that a capture wraps the user's in.
_WRAPPER = re.compile(r"(?:\b_export_root\.?)?(?:\bingot_wrapped\.?)+|\b_export_root\.")
# The remedy of branches and loops that depend on a tensor's values, where the code is not known.
BRANCHES = (
    "use torch.where or torch.cond, or state a condition that always holds by torch._check; --capture script keeps "
    "branches, and loops such as over range(int(x))"
)
# An operator whose shapes PyTorch cannot compute without running it.
_UNSHAPED = re.compile(r"\w+\.\w+\.\w+")
_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\(([\w:.]+)\)>.*?`(\w+)\.register_fake`", re.DOTALL)


class Kind(Enum):
    """The kind of edit that resolves a cause."""

    DECISION = "decision"
    NUMBER = "number"
    FIXED = "fixed"
    OTHER = "other"


@dataclass(frozen=True)
class Cause:
    """The cause of a failed capture, in one sentence, and advice that does not depend on the code."""

    kind: Kind
    sentence: str
    advice: str = ""


def find_cause(error: BaseException) -> Cause:
    """Return the cause of an exporter's error."""
    text = str(error)
    if "Constraints violated" in text:
        return _dimensions(text)
    if "extract specialized integer" in text or "tolist()" in text or re.search(r"expression z?u\w+ \(unhinted", text):
        return Cause(
            Kind.NUMBER,
            "its code needs a tensor's value as a Python number (such as `int(x.sum())`), which a graph does not have",
            "keep the value in a tensor (no .item(), .tolist() or int()); --capture script keeps loops such as over "
            "range(int(x))",
        )
    if re.search(r"data-dependent|DataDependent|inputs to control flow", f"{type(error)} {text}", re.IGNORECASE):
        return Cause(
            Kind.DECISION,
            "its code branches on the values of a tensor (such as `if x.sum() > 0`), which a graph cannot",
            BRANCHES,
        )
    if "Pending unbacked symbols" in text:
        return Cause(
            Kind.OTHER,
            "the number of elements of a result depends on values, and PyTorch's decomposition loses it",
            "compute a result of a fixed size, such as a mask",
        )
    if _UNSHAPED.fullmatch(text):
        return Cause(
            Kind.OTHER,
            f"PyTorch cannot compute the shapes of the results of {text}",
            "rewrite that part, or call it in an operator defined with ingot.op, which states them",
        )
    if found := _FAKE.search(text):
        operator, function = found.groups()
        return Cause(
            Kind.OTHER,
            f"the operator {operator} does not declare the shapes of its outputs",
            f"register them: `@{function}.register_fake` above a function of the same arguments that returns an empty "
            "tensor of the right shape, such as `torch.empty_like(x)`",
        )
    if "prim::DictConstruct" in text:  # a message of PyTorch's older exporter
        return Cause(
            Kind.OTHER,
            "its TorchScript creates a dict (usually an output), which ONNX does not have",
            "let it return a tuple of tensors and name them with --output-name, or export the source code of the "
            "TorchScript, which may return a dict",
        )
    if "numpy()" in text:
        return Cause(
            Kind.OTHER, "its code leaves PyTorch for numpy, which a graph cannot", "compute with torch instead"
        )
    return Cause(Kind.OTHER, _paragraph(text) or type(error).__name__)


def _paragraph(text: str) -> str:
    """Return the first paragraph in one line; the rest is for PyTorch's developers."""
    return " ".join(_WRAPPER.sub("", text.strip().split("\n\n", 1)[0]).split())[:500]


def _dimensions(text: str) -> Cause:
    """Return the cause in a message about dynamic dimensions, in the syntax of ``--input``."""
    fixes = dict(_LINE.findall(text.partition("Suggested fixes:")[2]))
    sizes = {name: int(value) for name, value in fixes.items() if value.isdecimal()}
    sizes |= {name: int(value) for name, value in _STEPPED.findall(text)}
    if sizes and all(size == 1 for size in sizes.values()):
        shown = _listed(f"'{name}'" for name in sizes)
        return Cause(
            Kind.FIXED,
            f"the example has size 1 along {shown}, which torch.export treats as fixed",
            "use an example of 2 or more samples, such as torch.cat([x, x]), or declare the dimension as 1",
        )
    if sizes:
        shown = _listed(f"'{name}' at {size}" for name, size in sizes.items())
        return Cause(
            Kind.FIXED,
            f"the model's code, or a layer in it, fixes {shown}, its size during the capture",
            "replace the code that depends on the size, such as a Python loop over it or a literal number, or "
            "declare a number instead of the name",
        )
    ranges = {name: found.groups() for name, value in fixes.items() if (found := _DIM.fullmatch(value))}
    multiples = {name: found for name, value in fixes.items() if (found := _DERIVED.fullmatch(value))}
    if multiples:
        return _multiples(multiples, ranges)
    if ranges:
        shown = _listed(f"{name}={low or ''}..{_limit(high) or ''}" for name, (low, high) in ranges.items())
        instead = "or choose a number by torch.sym_max or torch.sym_min instead of by a condition on a size"
        return Cause(Kind.OTHER, "the model's code limits its dimensions", f"declare them as {shown}, {instead}")
    equal = {name: value for name, value in fixes.items() if value.isidentifier()}
    if equal:
        shown = _listed(f"'{name}' and '{value}'" for name, value in equal.items())
        return Cause(Kind.OTHER, f"the model needs {shown} to be equal", "declare them with one name")
    unequal = re.findall(r"values of (\w+) = .* satisfy the generated guard \S+ != (\d)\.?$", text, re.MULTILINE)
    if unequal:
        shown = _listed(f"{name}={int(size) + 1}.." for name, size in unequal)
        return Cause(Kind.OTHER, "the model's code does not work for all sizes", f"declare {shown}")
    if guards := _GUARD.findall(text):
        names = {source: name for name, source, _ in guards}
        shown = "; ".join(dict.fromkeys(_named(guard, names) for _, _, guard in guards))
        return Cause(
            Kind.OTHER,
            f"the model's code depends on sizes, and was captured for {shown}",
            "declare ranges within that, or remove the condition",
        )
    return Cause(Kind.OTHER, _paragraph(text))


def _named(guard: str, names: Mapping[str, str]) -> str:
    for source, name in names.items():
        guard = guard.replace(source, name)
    return guard


def _multiples(found: Mapping[str, re.Match[str]], ranges: Mapping[str, tuple[str | None, ...]]) -> Cause:
    needs, declared, narrower = [], [], []
    named = _listed(f"'{name}'" for name in found)
    for name, match in found.items():
        factor, base, sign, rest = int(match[1] or 1), match[2], match[3], int(match[4] or 0)
        offset = -rest if sign == "-" else rest
        shown = f" {'less' if offset < 0 else 'plus'} {rest}" if offset else ""
        needs.append(f"'{name}' to be a multiple of {factor}{shown}")
        last = factor * _limit(ranges.get(base, (None, None))[-1])
        declared += [f"{name}=..{last or ''}:{factor}"] if not offset else []
        if last:
            # PyTorch also reports integer division, which works for all sizes whose quotient is 2 or more.
            narrower.append(f"{name}={2 * factor}..{last + offset}")
    ways = [
        *([f"declare {_listed(declared)}"] if len(declared) == len(found) else ["pad inside the model"]),
        *([f"declare a narrower range, such as {_listed(narrower)}"] if narrower else []),
        f"declare {named} as one size",
    ]
    return Cause(
        Kind.OTHER,
        f"the model's code needs {_listed(needs)}, which a dynamic dimension does not guarantee",
        ", or ".join(ways),
    )


def _limit(text: str | None) -> int:
    """Return the largest size of a range; 0 if there is none, for which PyTorch also writes the largest integers."""
    limit = 0 if text in (None, "oo") else int(text or 0)
    return limit if limit < 1 << 48 else 0


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items)
