"""The search for the fastest model that keeps its accuracy.

Families of plans are tried first. Starting with the fastest, one that exceeds the budget is improved: by other ranges,
by moving outliers into the weights, and finally by keeping the layers that hurt most, found by one ranking and a
bisection. A family is improved only while it could still beat the best within the budget.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from statistics import median

from ingot.errors import IngotError
from ingot.quant.config import QuantConfig, installed
from ingot.quant.graph.layers import choose
from ingot.quant.measure import limits
from ingot.quant.measure.limits import Deadline, TimeUp
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.measure.trial import FASTER, Trial
from ingot.quant.schemes.plan import Plan, fitting
from ingot.quant.search import sensitivity
from ingot.quant.search.families import families, float_embeddings, refinements
from ingot.quant.search.journal import Journal
from ingot.quant.search.ranking import Ranking
from ingot.quant.search.sensitivity import Noise
from ingot.runtime.profiling import profile

log = logging.getLogger(__name__)

# Finalists are timed again in turn; for a large model, only the best.
_FINALISTS = 4
# Seconds to time each of them at each batch size, in each round; with less than the second number they are not timed.
_FINAL_TIMING = 0.5
_LEAST_TIMING = 0.05
# The first timing is short: it may be wrong by this share, whatever the spread of its calls.
_DOUBT = 0.15
# How many of the fastest are tried with one scale per tensor.
_COARSENED = 3

# Drops closer than this count as equal: the order of sums depends on the threads.
_CLOSE = 1e-3


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        chosen: the fastest trial within the budget, or None.
        trials: all trials.
        noises: the damage by each layer of the chosen plan, largest first, if it was measured.
        complete: whether the search ended within its time.
        cost: seconds per attempt.
        notes: remarks on the whole search.
        remarks: by plan, the reason why one within the budget with a higher speed-up was not chosen.
    """

    chosen: Trial | None
    trials: tuple[Trial, ...]
    _: KW_ONLY
    noises: tuple[Noise, ...] = ()
    complete: bool = True
    cost: float = field(default=0.0, compare=False)
    notes: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether no trial can run."""
        return bool(self.trials) and all(trial.failure for trial in self.trials)


class Search:
    """One search.

    Args:
        runner: tries plans.
        config: the configuration.
        journal: keeps results, and has those of an earlier run.
        progress: called with the name of each step as it begins.
        deadline: the end of the search; by default after the configuration's budget.
    """

    def __init__(
        self,
        runner: TrialRunner,
        config: QuantConfig,
        journal: Journal,
        progress: Callable[[str], None],
        *,
        deadline: Deadline | None = None,
    ):
        self._runner = runner
        self._config = config
        self._journal = journal
        self._progress = progress
        self._deadline = deadline or Deadline(config.budget)
        self._costs: list[float] = []  # seconds of each attempt
        self._trials: dict[str, Trial] = {}
        self._noises: dict[str, list[Noise]] = {}
        self._origins: dict[str, str] = {}  # plans from which others were made by keeping layers
        self._unproven: set[str] = set()  # plans whose measurements are only from the journal
        self._refused: set[str] = set()  # plans that were not faster when they were timed again
        self._ranking = Ranking(batched=runner.source.signature.batch is not None)
        self._kept = choose(runner.source.names, config.keep)

    def run(self) -> Found:
        """Search until nothing faster can be expected, or the time is up."""
        complete = True
        self._runner.check = self._check_time
        try:
            self._explore()
        except TimeUp:
            complete = False
        finally:
            self._runner.check = lambda: None
        chosen, timed = self._choose()
        good = {key: trial for key, trial in self._trials.items() if self._good(trial)}
        unfinished = () if complete else ("the time was up before the search was complete",)
        noises = self._noises.get(self._origins.get(chosen.plan.key, chosen.plan.key), []) if chosen is not None else []
        return Found(
            chosen,
            tuple(self._trials.values()),
            noises=tuple(noises),
            complete=complete,
            cost=self._cost,
            notes=(*unfinished, *self._ranking.undecided(timed)),
            remarks=self._ranking.remarks(chosen, good, timed) if chosen is not None else {},
        )

    def _explore(self) -> None:
        engines = [name for name in self._config.engines or installed() if name in self._runner.source.engines]
        plans = families(self._runner.source, self._has_data, engines)
        # In a plan that is entirely in bfloat16, no layer can be kept.
        asked = (plan for plan in plans if plan.schemes or not self._kept)
        first = [self._try(plan.keep(self._kept)) for plan in asked]
        for trial in sorted(first, key=lambda item: -item.speed):
            if not self._hopeful(trial):
                break
            if not trial.holds(self._config.max_drop):
                self._improve(trial)
        self._vary()

    @property
    def _has_data(self) -> bool:
        return self._runner.calibration is not None

    def _good(self, trial: Trial) -> bool:
        return not trial.failure and trial.holds(self._config.max_drop) and trial.faster

    def _different(self, wanted: Callable[[Trial], bool]) -> list[Trial]:
        """Return the wanted plans, the best first; of plans with equal models, which share a timing, the first."""
        models: dict[object, Trial] = {}
        for trial in filter(wanted, self._trials.values()):
            models.setdefault((trial.latency, trial.size), trial)
        return sorted(models.values(), key=lambda trial: -self._ranking.worth(trial))

    def _doubtful(self, trial: Trial) -> bool:
        """Return whether a plan that holds was refused by its speed, and might not be by a longer timing."""
        if trial.failure or trial.faster or not trial.holds(self._config.max_drop):
            return False
        return trial.plan.key not in self._refused and trial.speed * (1 + max(trial.spread, _DOUBT)) >= FASTER

    def _finalists(self) -> list[Trial]:
        """Return the best plans, all of them measured by this process: a journal may be old, damaged or forged.

        Up to half are plans that would be the best if they had not been slower at some batch size. If no plan is
        faster, those that nearly are get a second look.
        """
        while True:
            # All of them are in memory at once for the timing, with the original.
            count = 1 if self._runner.large else self._affordable
            good, doubtful = self._different(self._good), self._different(self._doubtful)
            if good:
                best = self._ranking.worth(good[0])
                doubtful = [trial for trial in doubtful if self._ranking.worth(trial) >= best][: count // 2]
            found = [*good[: count - len(doubtful)], *doubtful][:count]
            unproven = [trial for trial in found if trial.plan.key in self._unproven]
            if not unproven:
                return found
            for trial in unproven:
                self._measure_again(trial)

    def _measure_again(self, known: Trial) -> None:
        """Replace the journal's measurements of a plan by new ones."""
        self._progress(f"Measuring {known.plan.name} again")
        trial = self._attempt(known.plan)
        self._unproven.discard(trial.plan.key)
        self._trials[trial.plan.key] = trial
        if trial.failure:
            log.warning("'%s' failed, though the journal says otherwise: %s", trial.plan.name, trial.failure)
        elif not math.isclose(trial.drop, known.drop, rel_tol=_CLOSE, abs_tol=_CLOSE):
            log.warning("'%s' loses %.4g, but %.4g according to the journal", trial.plan.name, trial.drop, known.drop)

    def _choose(self) -> tuple[Trial | None, list[Trial]]:
        """Return the best plan, and those that it was timed in turn with; None if none is faster."""
        while finalists := self._finalists():
            timed = self._time_again(finalists)
            for before, after in zip(finalists, timed, strict=True):
                for key, trial in self._trials.items():
                    if (trial.latency, trial.size) == (before.latency, before.size):  # the same model, from any plan
                        self._trials[key] = replace(trial, latency=after.latency, baseline=after.baseline)
                        self._refused.add(key)
            if again := [trial for trial in timed if trial.faster]:
                return min(self._ranking.equal(again), key=lambda trial: trial.drop), timed
        return None, []

    def _time_again(self, finalists: Sequence[Trial]) -> list[Trial]:
        """Time the best in turn if there is time; otherwise keep their measurements."""
        calls = len(self._runner.batches) * (len(finalists) + 1)
        spare = (self._deadline.left - self._cost * (len(finalists) + 1)) / calls / profile.LOOKS
        if spare < _LEAST_TIMING:
            return list(finalists)
        self._progress("Timing the best once more")
        return self._runner.time_again(finalists, min(spare, _FINAL_TIMING), self._ranking.settled)

    @property
    def _cost(self) -> float:
        """The seconds of an attempt: building a model, loading, running and timing it."""
        return median(self._costs) if self._costs else 0.0

    @property
    def _affordable(self) -> int:
        """The number of models that can be built again in time, in addition to the one that is written."""
        if not self._cost or math.isinf(self._deadline.left):
            return _FINALISTS
        return max(1, min(_FINALISTS, int(self._deadline.left / self._cost) - 1))

    def _try(self, plan: Plan) -> Trial:
        if plan.key in self._trials:
            return self._trials[plan.key]
        trial = self._journal.get(plan)
        if trial is None:
            self._deadline.check(self._cost + self._reserve)
            tried = len(self._trials)
            self._progress(f"Trying {plan.name}" + (f" ({tried} tried{self._so_far()})" if tried else ""))
            trial = self._attempt(plan)
        else:
            self._unproven.add(plan.key)
        self._trials[plan.key] = trial
        return trial

    def _attempt(self, plan: Plan) -> Trial:
        began = self._deadline.now
        trial = self._runner.attempt(plan)
        self._costs.append(self._deadline.now - began)
        if limits.disk_is_full(trial.failure):  # not the plan's fault: it is tried again when there is space
            raise limits.disk_full()
        self._journal.add(trial)
        return trial

    @property
    def _fastest(self) -> float:
        """The speed of the best so far, or the least that counts as faster than the original."""
        return max((trial.speed for trial in self._trials.values() if self._good(trial)), default=FASTER)

    def _hopeful(self, trial: Trial) -> bool:
        """Return whether a plan is as fast as the best so far, so that improving it may be worthwhile."""
        faster = trial.faster or trial.unclear
        return not trial.failure and faster and trial.speed * (1 + trial.spread) >= self._fastest

    def _so_far(self) -> str:
        fastest = self._fastest
        return f", best {fastest:.2f}x" if fastest > FASTER else ""

    @property
    def _reserve(self) -> float:
        """The seconds for the end of a successful search: the best is timed once more, and written."""
        return 2 * self._cost if any(map(self._good, self._trials.values())) else 0.0

    def _check_time(self) -> None:
        self._deadline.check(self._reserve)

    def _vary(self) -> None:
        """Try forms of the fastest that hold which may be faster: float embeddings, and one scale per tensor.

        The latter has fewer factors to apply, at some loss.
        """
        for trial in self._different(self._good)[:_COARSENED]:
            for plan in float_embeddings(self._runner.source, trial.plan):
                self._try(plan)
        for trial in self._different(self._good)[:_COARSENED]:
            if trial.plan.per_channel and {"static", "dynamic"} & set(trial.plan.schemes.values()):
                self._try(replace(trial.plan, per_channel=False, name=f"{trial.plan.name}, one scale per tensor"))

    def _improve(self, broken: Trial) -> None:
        """Try variations of a plan that may hold."""
        tried = [broken]
        for plan in refinements(broken.plan):
            trial = self._try(plan)
            if self._good(trial):
                return
            tried.append(trial)
        hopeful = [trial for trial in tried if self._hopeful(trial)]
        # The ranking computes every layer twice.
        if hopeful and broken.plan.schemes and self._runner.source.one_call and not self._runner.large:
            self._keep_some(min(hopeful, key=lambda trial: trial.drop).plan)

    def _keep_some(self, plan: Plan) -> None:
        """Keep as few layers as necessary, of those that hurt most."""
        self._check_time()
        self._progress(f"Finding the layers that hurt {plan.name}")
        try:
            order = self._rank(plan)
        except IngotError as error:  # a graph that cannot be ranked is searched without a ranking
            log.warning("the layers of '%s' cannot be ranked: %s", plan.name, error)
            return

        def enough(count: int) -> bool:  # it holds, or is too slow for more floats to help
            kept = _kept(plan, order[:count])
            self._origins[kept.key] = plan.key
            trial = self._try(kept)
            return trial.holds(self._config.max_drop) or not self._hopeful(trial)

        count = fewest(len(order), enough)
        if count is None or not self._try(_kept(plan, order[:count])).holds(self._config.max_drop):
            return
        # For the kept layers, 8-bit weights alone may be faster than floats, and as exact.
        light = fitting(self._runner.source, "int8", order[:count])
        if light and plan.engine == "onnxruntime":
            name = f"{plan.name}, int8 weights alone for {len(light)}"
            mixed = replace(_kept(plan, order[:count]).but(light, "int8"), name=name)
            self._origins[mixed.key] = plan.key
            self._try(mixed)

    def _rank(self, plan: Plan) -> list[str]:
        if plan.key not in self._noises:
            samples = self._runner.calibration or self._runner.evaluation
            self._noises[plan.key] = sensitivity.rank(
                self._runner.source,
                plan,
                self._runner.seen if plan.needs_data else {},
                samples,
                seed=self._config.seed,
                progress=self._ranked,
            )
        return [noise.layer for noise in self._noises[plan.key]]

    def _ranked(self, done: int, total: int) -> None:
        self._check_time()
        self._progress(f"Ranking layers: {done} of {total}")


def fewest(most: int, enough: Callable[[int], bool]) -> int | None:
    """Return the smallest count from 1 to ``most`` that is enough, by doubling and then halving; None if there is none.

    ``enough`` is assumed to be monotonic.
    """
    high = 1
    while high < most and not enough(high):
        high *= 2
    low, high = high // 2, min(high, most)
    if not enough(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _kept(plan: Plan, layers: Sequence[str]) -> Plan:
    return replace(plan.keep(layers), name=f"{plan.name}, {len(layers)} kept")
