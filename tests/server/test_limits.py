from __future__ import annotations

import pytest

from ingot.errors import TooLarge, Unavailable
from ingot.server.net.limits import SMALL_BYTES, Budget, check_size


@pytest.mark.parametrize(
    ("limit", "named"),
    [(2 << 20, r"2 MiB \(--max-body-mb\)$"), (SMALL_BYTES, "1 MiB, which --max-body-mb raises for inference only$")],
)
def test_a_body_over_the_limit_names_the_option_that_raises_it(limit: int, named: str) -> None:
    check_size(limit, limit)
    with pytest.raises(TooLarge, match=f"has {limit + 1} bytes, over the limit of {named}"):
        check_size(limit + 1, limit)


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
