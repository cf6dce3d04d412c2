"""The choice of the variant to serve if an archive has several and none was named."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from ingot import foreign
from ingot.errors import IngotError, Unsupported
from ingot.model_store import Variant
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.loader import engine_of, measured_with, precision_of
from ingot.runtime.engines.opening import ENGINES
from ingot.runtime.engines.ort.convolutions import measurable
from ingot.runtime.loading import comparison
from ingot.runtime.loading.comparison import EQUAL, Costs
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.machine import devices, plugins
from ingot.runtime.settings.settings import Settings

log = logging.getLogger(__name__)

Reason = Literal["", "requested", "only", "recorded", "measured", "preferred"]
"""Why a variant is served.

It was named (``requested``); it alone runs here (``only``); it is the fastest, according to the archive's records from
this machine (``recorded``) or to timing now (``measured``); or it is the first in the archive's order (``preferred``).
Empty for a file, which has no variants.
"""


@dataclass(frozen=True)
class Choice:
    """A variant or file with its first engine, and the reason for choosing it. ``why`` is shown to clients.

    ``tested`` is whether the engine has reproduced the goldens already.
    """

    spec: LoadSpec
    engine: Engine
    _: KW_ONLY
    reason: Reason = ""
    why: str = ""
    tested: bool = False

    @property
    def properties(self) -> dict[str, str]:
        """The properties that clients see; empty for a file, which has no variants."""
        if not self.spec.variant:
            return {}
        found = {"variant": self.spec.variant, "variant_reason": self.reason, "variant_detail": self.why}
        return {name: text for name, text in found.items() if text}


Choose = Callable[[], Choice]


def single_variant(spec: LoadSpec, settings: Settings | None = None, reason: Reason = "", model: str = "") -> Choose:
    """Return a chooser for a single candidate, whose engine is opened when the chooser is called."""
    settings = settings or Settings()

    def choose() -> Choice:
        placed = spec.placed(settings, model)
        engine, tested = placed.start(placed.device(), settings.threads, model)
        return Choice(placed, engine, reason=reason, tested=tested)

    return choose


def warn_of(variant: Variant, model: str, settings: Settings) -> None:
    """Log reasons against a variant that is served anyway, since it was named or is the only one."""
    if variant.serving.format == "onnx" and (reason := obstacle(variant, settings)):
        log.warning("model %s: variant %s may not run well here: %s", model, variant.name, reason)
    if variant.serving.evidence.holds is False:
        log.warning("model %s: variant %s exceeded its accuracy budget", model, variant.name)


class Chooser:
    """Opens the variant that serves best on this machine; see :data:`Reason`.

    Variants that cannot run here are left out. Variants that missed their accuracy budget are used only if no other is
    left. Of the rest the fastest is chosen; differences of less than 5 % are ignored, and the archive's order decides.
    At most two variants are in memory at once: they are compared with the default options of convolutions, and the one
    that is chosen is opened again to measure which are the fastest.

    Args:
        model: its name in messages.
        variants: of one archive, in its order.
        settings: how the chosen variant will be run.
    """

    def __init__(self, model: str, variants: Sequence[Variant], settings: Settings):
        self._model = model
        self._variants = variants
        self._settings = settings
        self._left_out: dict[str, str] = {}

    def __call__(self) -> Choice:
        """Choose a variant and open its engine.

        Raises:
            Unsupported: no variant can run here; the message gives the reason for each.
        """
        self._left_out = {}
        able = [variant for variant in self._variants if self._can_run(variant)]
        kept = [variant for variant in able if variant.serving.evidence.holds is not False]
        broken = [variant for variant in able if variant.serving.evidence.holds is False]
        choice = self._among(kept)
        if choice is None:
            choice = self._among(broken)
        else:
            self._left_out.update({variant.name: "it exceeded its accuracy budget" for variant in broken})
        if choice is None:
            raise Unsupported(f"no variant of model '{self._model}' can run here: {self._reasons()}")
        log.info(
            "model %s: variant %s, %s%s%s",
            self._model,
            choice.spec.variant,
            choice.reason,
            f": {choice.why}" if choice.why else "",
            f"; left out: {self._reasons()}" if self._left_out else "",
        )
        return choice

    def _can_run(self, variant: Variant) -> bool:
        reason = obstacle(variant, self._settings)
        if reason:
            self._left_out[variant.name] = reason
        return not reason

    def _among(self, variants: Sequence[Variant]) -> Choice | None:
        """Choose from variants that should run; those that fail to are left out with a warning."""
        if self._settings.variant_choice == "preferred":
            return self._first(variants, "the archive's first variant that runs here")
        measured = all(measured_with(variant, self._settings.engine) for variant in variants)
        if len(variants) > 1 and measured and not self._uses_others_hardware():
            costs = comparison.recorded(variants)
            if costs is not None:
                return self._by_record(variants, costs)
        return self._by_timing(variants)

    def _uses_others_hardware(self) -> bool:
        """Return whether models run on other hardware than they were timed on: all CPU cores."""
        return self._settings.instances > 1 or (self._settings.device != "cpu" and devices.has_cuda())

    def _first(self, variants: Sequence[Variant], why: str) -> Choice | None:
        for variant in variants:
            if opened := self._open(variant):
                return Choice(*opened, reason="preferred", why=why, tested=True)
        return None

    def _by_record(self, variants: Sequence[Variant], costs: Mapping[str, Costs]) -> Choice | None:
        left = list(variants)
        while left:
            speeds = [comparison.speed(costs[item.name], costs[left[0].name]) for item in left]
            best = next(item for item, speed in zip(left, speeds, strict=True) if speed * EQUAL >= max(speeds))
            left.remove(best)
            if opened := self._open(best):
                texts = [comparison.describe(best.name, costs[best.name], item.name, costs[item.name]) for item in left]
                reason: Reason = "recorded" if left else "only"
                return Choice(*opened, reason=reason, why="; ".join(texts), tested=True)
        return None

    def _by_timing(self, variants: Sequence[Variant]) -> Choice | None:
        best: tuple[LoadSpec, Engine] | None = None
        texts: list[str] = []
        for variant in variants:
            opened = self._open(variant, timed=len(variants) > 1)
            if opened is None:
                continue
            if best is None:
                best = opened
                continue
            best, loser, text = self._race(best, opened)
            _close(*loser)
            texts.append(text)
        if texts and best is not None:
            best = self._tuned(*best)
        if best is None:
            return None
        return Choice(*best, reason="measured" if texts else "only", why="; ".join(texts), tested=True)

    def _tuned(self, spec: LoadSpec, engine: Engine) -> tuple[LoadSpec, Engine] | None:
        """Return a timed variant with the fastest options of convolutions, if it is to be served so."""
        convolving = "convolutions" in engine.settings and not engine.capabilities.captured
        if self._settings.convolutions != "auto" or not convolving or not measurable(engine.signature):
            return spec, engine
        _close(spec, engine)
        variant = next(variant for variant in self._variants if variant.name == spec.variant)
        return self._open(variant) or self._open(variant, timed=True)

    def _race(
        self, first: tuple[LoadSpec, Engine], second: tuple[LoadSpec, Engine]
    ) -> tuple[tuple[LoadSpec, Engine], tuple[LoadSpec, Engine], str]:
        """Time two open candidates; return the winner, the other one and the comparison as text."""
        names = first[0].variant, second[0].variant
        cases = first[0].goldens or second[0].goldens
        if not cases:
            return first, second, f"{names[0]} and {names[1]} could not be timed because the archive has no goldens"
        variant, settings = self._variants[0], self._settings
        engines, budget = (first[1], second[1]), settings.choice_time

        def timed() -> list[Costs]:
            if variant.serving.generation is not None:
                return comparison.measured_steps(engines, settings.slots, budget)
            limit = settings.limits.max_batch
            return comparison.measured(engines, variant.signature, cases[0].inputs, limit, budget)

        costs = foreign.outcome(timed)
        if isinstance(costs, Exception):  # either can serve
            log.warning("model %s: %s and %s could not be timed: %s", self._model, *names, costs)
            return first, second, f"{names[0]} and {names[1]} could not be timed"
        if comparison.speed(costs[1], costs[0]) >= EQUAL:
            return second, first, comparison.describe(names[1], costs[1], names[0], costs[0])
        return first, second, comparison.describe(names[0], costs[0], names[1], costs[1])

    def _open(self, variant: Variant, *, timed: bool = False) -> tuple[LoadSpec, Engine] | None:
        """Return a variant's tested engine, or None. An engine that is to be timed is opened at full speed."""
        opened = foreign.outcome(lambda: self._tested(variant, timed=timed))
        if not isinstance(opened, Exception):
            return opened
        if not isinstance(opened, IngotError):
            log.error("model %s: variant %s failed", self._model, variant.name, exc_info=opened)
        self._left_out[variant.name] = str(opened) or type(opened).__name__
        log.warning("model %s: variant %s is left out: %s", self._model, variant.name, opened)
        return None

    def _tested(self, variant: Variant, *, timed: bool) -> tuple[LoadSpec, Engine]:
        plain = timed and self._settings.convolutions == "auto"
        settings = replace(self._settings, convolutions="default") if plain else self._settings
        spec = LoadSpec.of_variant(variant, settings).placed(settings, self._model)
        device, threads = spec.device(), self._settings.threads
        engine, tested = (spec.open(device, threads), False) if timed else spec.start(device, threads, self._model)
        with contextlib.ExitStack() as on_error:
            on_error.callback(engine.close)
            if devices_of(variant) == {"cuda"} and engine.device == "cpu":
                raise Unsupported("it is made for GPUs, and the engine could not use the one in this machine")
            if not tested:
                spec.test(engine, self._model)
            on_error.pop_all()
        return spec, engine

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self._left_out.items())


def _close(spec: LoadSpec, engine: Engine) -> None:
    engine.close()
    if spec.placement is not None:  # or its plan would take memory from the next candidate
        spec.placement.release()


def devices_of(variant: Variant) -> set[str]:
    """Return the devices that a variant was made for; empty if it runs on any."""
    return set(filter(None, variant.serving.requires.get("device", "").split(", ")))


def obstacle(variant: Variant, settings: Settings) -> str:
    """Return why a variant cannot run here, as far as that is known before loading; empty if no reason is known."""
    if variant.serving.format != "onnx" and not settings.allow_code:
        return f"its format '{variant.serving.format}' can run its author's code, which needs --allow-code"
    if variant.serving.format != "pt2" and settings.shards > 1:
        return f"only format 'pt2' can be divided over {settings.shards} processes (--shards)"
    wanted = devices_of(variant)
    if "cuda" in wanted and settings.device == "cpu":
        return "it is made for GPUs, and the device is 'cpu'"
    if "cuda" in wanted and not devices.has_cuda():
        return "it is made for GPUs, and this machine has none"
    if wanted and "cuda" not in wanted and settings.device not in ("auto", "cpu"):
        return f"it is made for CPUs, and the device is '{settings.device}'"
    if precision_of(variant) == "tf32" and (settings.device == "cpu" or not devices.has_cuda()):
        return "it is computed in TF32, which only GPUs have"
    if variant.serving.format != "onnx":
        return ""
    if precision_of(variant) == "bf16" and not devices.has_bf16():
        return "it is computed in bfloat16, which this processor has no instructions for"
    return _engine_obstacle(engine_of(variant, settings.engine), settings)


def _engine_obstacle(engine: str, settings: Settings) -> str:
    if engine not in (*ENGINES, *plugins.names("ingot.engines")):
        return f"it would run in the engine '{engine}', which this version does not have"
    if engine == "tensorrt" and (settings.device == "cpu" or not devices.has_cuda()):
        return "it would run in TensorRT, which needs an NVIDIA GPU"
    if engine != "openvino":
        return ""
    if settings.device not in ("auto", "cpu"):
        return f"it would run in OpenVINO, which runs models on the CPU only, and the device is '{settings.device}'"
    # Located and not imported, which would take time and memory that may not be needed.
    if importlib.util.find_spec("openvino") is None:
        return "it would run in OpenVINO, which is not installed: pip install 'ingot-serve[openvino]'"
    return ""
