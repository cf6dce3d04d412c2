from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest

from ingot.export.capture import conditions
from ingot.export.capture.conditions import always, plain
from ingot.tensors import Range

N, H, W = "_size('n')", "_size('h')", "_size('w')"
CONDITIONS = [
    (f"{N} <= {N}", {}, True),
    (f"{N} == 1 or {N} == {N}", {}, True),
    (f"{N} == 1 or {N} == 2", {}, False),
    (f"{H} == 2 + 2*((-1 + {H}) // 2)", {"h": Range(2, None, 2)}, True),
    (f"{H} == 2 + 2*((-1 + {H}) // 2)", {}, False),
    (f"2 + 2*((-1 + {H}) // 4) == 1 + ((-1 + {H}) // 2)", {"h": Range(4, None, 4)}, True),
    (f"{H} % 2 == 0 or {H} % 2 == 1", {}, True),
    (f"256*{N}*(-2 + {H}) != 0", {"h": Range(3)}, True),
    (f"256*{N}*(-2 + {H}) != 0", {}, False),
    (f"{H} * {W} > 5", {"h": Range(2), "w": Range(3)}, True),
    (f"1 < {H} <= {H} * {W}", {"h": Range(2)}, True),
    (f"1 < {H} < {H} * {W}", {"h": Range(2)}, False),
    (f"{N} != 7", {"n": Range(2, None, 2)}, False),  # not decided
    (f"({H} // 2) // 3 == {H} // 6", {}, True),
    (f"{N} // {H} <= {N}", {}, False),  # not decided: no quotient of polynomials
    (f"not {N} == 0", {}, False),  # not decided
    (f"max({N}, 2) >= 2", {}, False),  # not decided: either may be the larger
    (f"max({N}, 1) >= 1", {}, True),
    (f"min(3, {N}, 8) == 3", {"n": Range(3)}, True),
    (f"({N}*{H}) // {H} == {N}", {}, True),
    (f"({N}*{H}) // {H} == {N}", {"h": Range(0)}, False),  # h may be 0
    (f"({N}*{H}) % {H} == 0", {}, True),
    (f"({N}*{H} + {H} - 1) // {H} == {N}", {}, True),
    (f"({N}*{H} + {H}) // {H} == {N}", {}, False),
    (f"({N}*{H} + {H} - 1) % {H} == {H} - 1", {}, True),
    (f"({N}*{H}) // (2*{H}) == {N} // 2", {}, True),
    (f"({N}*{H}) // ({H} - 2) >= 0", {}, False),
    (f"({N}*{H}) / {H} == {N}", {}, True),
    (f"32 // ((4*(({N}*{H}) // {H})) // {N}) == 8", {}, True),
    (f"max(1, 32 // ((4*(({N}*{H}) // {H})) // {N})) * {N} % 8 == 0", {}, True),
    (f"(32*{N}*{H}*{W}) % 32 == 0", {}, True),  # for all remainders together: there are 32768 apart
]


@pytest.mark.parametrize(("code", "ranges", "proved"), CONDITIONS)
def test_a_condition_is_proved_by_arithmetic(code: str, ranges: dict[str, Range], proved: bool) -> None:
    assert always(code, ranges) is proved
    if proved:
        names = [name for name in ("n", "h", "w") if f"'{name}'" in code]
        choices = [[size for size in range(1, 31) if size in ranges.get(name, Range())] for name in names]
        compiled = compile(code, "condition", "eval")
        for sizes in itertools.product(*choices):
            assert eval(compiled, {"_size": dict(zip(names, sizes, strict=True)).__getitem__}), sizes


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (f"256*{N}*(-2 + {H}) != 0", "h != 2"),
        (f"{H}*{W} <= 1000", "h * w <= 1000"),
        (f"-3*{H} < -12", "4 < h"),
        (f"96*(({N}*{H}) // {H}) >= 96", "n >= 1"),
        (f"{H} % 2 == 0", "h % 2 == 0"),
        (f"(({H}*{N}) // {N}) % 2 == {W} - {W}", "h % 2 == 0"),
        (f"{N} == 1 or {N}*3 == 6", "n == 1 or n == 2"),
        (f"max({N}, 2*{H}) != 7", "max(n, 2 * h) != 7"),
        ("_size('class') * 2 > 8", "class > 4"),
        ("a b", "as it was"),
    ],
)
def test_a_condition_is_shown_in_its_simplest_form(code: str, shown: str) -> None:
    assert plain(code, "as it was") == shown


def test_a_part_that_occurs_within_others_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that round their sizes in each layer have conditions of many such parts, none of which is a polynomial."""
    counted = Mock(wraps=conditions._floored)
    monkeypatch.setattr(conditions, "_floored", counted)
    size = "_size('n')"
    for _ in range(12):
        size = f"({size} + 6) // 7"
    plain(f"{size} == 5", "as it was")
    assert counted.call_count == 12
