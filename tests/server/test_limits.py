from __future__ import annotations

import pytest

from ingot.errors import TooLarge, Unavailable
from ingot.server.net.limits import SMALL_BYTES, Budget, check_size


@pytest.mark.parametrize(
    ("limit", "named"),
    [(1 << 20, r"1 MiB \(--max-body-mb\)$"), (min(SMALL_BYTES, 1 << 20), "1 MiB for this operation$")],
)
def test_a_body_over_the_limit_names_the_option_that_raises_it(limit: int, named: str) -> None:
    """Also with ``--max-body-mb 1``, where both limits have the same value."""
    check_size(1 << 20, limit)
    with pytest.raises(TooLarge, match=f"has 1048577 bytes, over the limit of {named}"):
        check_size((1 << 20) + 1, limit)


def test_a_budget_is_shared_and_given_back() -> None:
    budget = Budget(100)
    with budget.reserve() as first:
        first.add(60)
        with pytest.raises(Unavailable, match="memory limit for request bodies"), budget.reserve() as second:
            second.add(50)
        with budget.reserve() as third:
            third.add(40)
    with budget.reserve() as alone:
        alone.add(50)
        alone.add(500)  # one request is bounded by its own limit; otherwise it could never be answered
