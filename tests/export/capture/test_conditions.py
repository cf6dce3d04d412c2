from __future__ import annotations

import itertools

import pytest

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
    (f"{N} // {H} <= {N}", {}, False),  # not decided: it divides by a size
    (f"not {N} == 0", {}, False),  # not decided
    (f"max({N}, 1) >= 1", {}, False),  # not decided
]


@pytest.mark.parametrize(("code", "ranges", "proved"), CONDITIONS)
def test_a_condition_is_proved_by_arithmetic(code: str, ranges: dict[str, Range], proved: bool) -> None:
    assert always(code, ranges) is proved
    if proved:
        choices = [[size for size in range(1, 31) if size in ranges.get(name, Range())] for name in ("n", "h", "w")]
        for sizes in itertools.product(*choices):
            assert eval(code, {"_size": dict(zip(("n", "h", "w"), sizes, strict=True)).__getitem__}), sizes


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (f"256*{N}*(-2 + {H}) != 0", "h != 2"),
        (f"{H}*{W} <= 1000", "h*w <= 1000"),
        (f"-3*{H} < -12", "4 < h"),
        (f"{H} % 2 == 0", "as it was"),
        (f"{N} == 1 or {N} == 2", "as it was"),
    ],
)
def test_common_terms_are_cancelled(code: str, shown: str) -> None:
    assert plain(code, "as it was") == shown
