from __future__ import annotations

import pytest

from ingot.errors import Unavailable
from ingot.server.net.limits import Budget


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
