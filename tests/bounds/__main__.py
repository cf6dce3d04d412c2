"""Random calls of all operators: ``python -m tests.bounds SEED ROUNDS [OPERATOR...]`` prints what became of them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence

from tests.bounds.generated import Maker, Outcome, attempt, described
from tests.bounds.recipes import RECIPES

_MISFITS = 0.15
_TRIES = 3  # as some calls do not fit their operator


def outcome_of(seed: int, rounds: int, only: Sequence[str] = ()) -> Outcome:
    """Make ``rounds`` calls of each operator, or of ``only`` those; the last line of stderr names the last call."""
    outcome = Outcome()
    names = [name for name in sorted(RECIPES) if not only or name[1] in only]
    for number in range(seed, seed + rounds):
        maker = Maker(random.Random(number))
        for domain, operator in maker.rng.sample(names, len(names)):
            for _ in range(_TRIES):
                call = RECIPES[domain, operator](maker, operator)
                call = maker.misfit(call) if maker.chance(_MISFITS) else call
                print(number, described(call), file=sys.stderr, flush=True)
                if attempt(maker, call, outcome):
                    break
    return outcome


if __name__ == "__main__":
    found = outcome_of(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    json.dump({"ran": found.ran, "wrong": found.wrong, "refused": found.refused}, sys.stdout, indent=1)
