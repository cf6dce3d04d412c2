"""Which of the measured plans is the best, as far as their timings can distinguish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.quant.measure.trial import Trial

# More timing is of no use once speeds are certain to this share.
_CERTAIN = 0.02
# A plan whose rows affect each other must be up to this much faster than one whose requests can be batched.
_UNJOINED = 1.2
# And at least this much: batches share the server's work around calls too.
_LEAST_UNJOINED = 1.05
# Speeds closer than this count as equal; then the more exact plan wins.
_EQUAL = 1.03


class Ranking:
    """Compares trials of one model.

    Args:
        batched: whether the model's requests may share a batch.
    """

    def __init__(self, *, batched: bool):
        self._batched = batched

    def worth(self, trial: Trial) -> float:
        """Return the speed, lower for a plan whose requests cannot be batched."""
        return trial.speed / self._price(trial)

    def equal(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the best trial, and those that the timing cannot distinguish from it."""
        best = max(trials, key=self.worth)
        return [trial for trial in trials if self.worth(trial) * (1 + _apart(trial, best)) >= self.worth(best)]

    def settled(self, timed: Sequence[Trial]) -> bool:
        """Return whether more timing would hardly change the choice."""
        rivals = [trial for trial in timed if trial.faster or trial.unclear]
        rivals = self.equal(rivals) if rivals else []
        return all(trial.spread <= _CERTAIN and not trial.unclear and not trial.disturbed for trial in rivals)

    def undecided(self, timed: Sequence[Trial]) -> tuple[str, ...]:
        """Return a remark on a choice among trials that the timing could not distinguish; none if it could."""
        faster = [trial for trial in timed if trial.faster]
        equal = self.equal(faster) if faster else []
        if len(equal) < 2 or max(trial.spread for trial in equal) <= _CERTAIN:
            return ()
        names = ", ".join(f"'{trial.plan.name}'" for trial in equal)
        return (f"the timing cannot say which of {names} is the fastest: the most exact of them was chosen",)

    def remarks(self, chosen: Trial, good: Mapping[str, Trial], finalists: Sequence[Trial]) -> dict[str, str]:
        """Return why trials with a higher speed-up than the chosen one were not chosen.

        Args:
            chosen: the best one.
            good: all trials that hold and are faster than the original, by the key of their plan.
            finalists: those that were timed in turn.
        """
        models = [(trial.size, trial.drop) for trial in finalists]
        remarks: dict[str, str] = {}
        for key, trial in good.items():
            if key == chosen.plan.key or trial.speed <= chosen.speed:
                continue
            priced = self.worth(trial)
            if priced < trial.speed and priced < self.worth(chosen) * _EQUAL:
                remarks[key] = f"counts as {priced:.2f}x: its requests are not batched"
            elif (trial.size, trial.drop) not in models:
                remarks[key] = f"timed once, not among the best {len(finalists)}"
            else:
                remarks[key] = f"within {_apart(trial, chosen):.0%} of the chosen one, less exact"
        return remarks

    def _price(self, trial: Trial) -> float:
        """Return the factor by which a plan must be faster: without batching a server loses what batches gain.

        That is the time of a row alone over that in the best batch; a model of long calls may gain nothing.
        """
        if not trial.plan.rows_touch or not self._batched:
            return 1.0
        each = {item.rows: item.seconds / item.rows for item in trial.latency}
        gain = each[min(each)] / min(each.values()) if len(each) > 1 else _UNJOINED
        return min(max(gain, _LEAST_UNJOINED), _UNJOINED)


def _apart(trial: Trial, other: Trial) -> float:
    """Return the share by which two speeds must differ to count as different."""
    return max(_EQUAL, (1 + trial.spread) * (1 + other.spread)) - 1
