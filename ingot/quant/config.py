"""Configurations of quantization, all frozen: one per recipe, and one for the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ingot.errors import InvalidArgument
from ingot.quant import options
from ingot.quant.data.ranges import Method
from ingot.quant.graph.source import Source
from ingot.quant.schemes.plan import EngineName, Plan, Scheme, fitting


@dataclass(frozen=True)
class Recipe:
    """The base of all recipes.

    Attributes:
        keep: layers that stay in floating point, by name, or by a prefix that ends at a dot.

    Raises:
        InvalidArgument: an option has an invalid value.
    """

    name: ClassVar[str]
    precision: ClassVar[str]
    version: ClassVar[int] = 1
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        options.settle(self)
        kinds = get_type_hints(type(self))
        for item in fields(self):
            value, choices = getattr(self, item.name), get_args(kinds[item.name])
            if get_origin(kinds[item.name]) is Literal and value not in choices:
                raise InvalidArgument(
                    f"{item.name} of {self.name} is '{value}'; it must be one of {', '.join(choices)}"
                )

    @property
    def needs_data(self) -> bool:
        """Whether it learns ranges from data."""
        return False

    def record(self) -> dict[str, Any]:
        """Return the recipe as archives record it."""
        return {"name": self.name, "version": self.version, **asdict(self)}


@dataclass(frozen=True)
class LayerRecipe(Recipe):
    """A recipe that gives each layer a scheme."""

    precision: ClassVar[str] = "int8"
    schemes: ClassVar[tuple[Scheme, ...]]
    per_channel: bool = True

    def plan(self, source: Source) -> Plan:
        """Return the plan of this recipe: each layer gets the first of the recipe's schemes that supports it."""
        chosen: dict[str, Scheme] = {}
        for scheme in self.schemes:
            for name in fitting(source, scheme):
                chosen.setdefault(name, scheme)
        return Plan(self.name, chosen, per_channel=self.per_channel, **self._details())

    def _details(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class StaticInt8(LayerRecipe):
    """Weights and activations in 8 bits, with ranges from calibration data (ONNX QDQ form); embeddings in 8 bits too.

    Attributes:
        per_channel: one scale per output channel, which keeps accuracy where channels differ in size.
        calibration: the method that derives ranges from the data.
        activations: ``u8`` with signed weights is what ONNX Runtime fuses into integer kernels on x86, ARM and CUDA;
            some accelerators need ``s8`` or ``u16``, which is slow here.
        between: also quantize the operators between two quantized layers, such as the addition of a residual.
        migrate: SmoothQuant's alpha, the share of the activations' spread that moves into the weights; 0 for none.
        correct: correct the biases by the mean error of the rounded weights.
    """

    name: ClassVar[str] = "static-int8"
    schemes: ClassVar[tuple[Scheme, ...]] = ("static",)

    calibration: Method = "minmax"
    activations: Literal["u8", "s8", "u16"] = "u8"
    between: bool = True
    migrate: float = 0.0
    correct: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.migrate <= 1:
            raise InvalidArgument(f"migrate is {self.migrate}; it must be from 0 to 1")

    @property
    def needs_data(self) -> bool:
        return True

    def plan(self, source: Source) -> Plan:
        """Return the plan of :class:`LayerRecipe`, with embeddings added."""
        return with_embeddings(source, super().plan(source))

    def _details(self) -> dict[str, Any]:
        return {
            "method": self.calibration,
            "activations": self.activations,
            "between": self.between,
            "migrate": self.migrate,
            "correct": self.correct,
        }


@dataclass(frozen=True)
class DynamicInt8(LayerRecipe):
    """Weights in 8 bits, activations in the range of each call: matrix products and LSTMs. Needs no data.

    Embeddings are stored in 8 bits too.
    """

    name: ClassVar[str] = "dynamic-int8"
    schemes: ClassVar[tuple[Scheme, ...]] = ("dynamic",)

    def plan(self, source: Source) -> Plan:
        """Return the plan of :class:`LayerRecipe`, with embeddings added."""
        return with_embeddings(source, super().plan(source))


@dataclass(frozen=True)
class WeightInt8(LayerRecipe):
    """Weights of matrix products and embeddings in 8 bits, activations as they are. Needs no data.

    Attributes:
        block: how many weights share a scale: 16, 32, 64, 128 or 256.
    """

    name: ClassVar[str] = "weight-int8"
    schemes: ClassVar[tuple[Scheme, ...]] = ("int8",)

    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block not in (16, 32, 64, 128, 256):
            raise InvalidArgument(f"the block is {self.block}; it must be 16, 32, 64, 128 or 256")

    def _details(self) -> dict[str, Any]:
        return {"block": self.block}


@dataclass(frozen=True)
class WeightInt4(WeightInt8):
    """Weights of matrix products in 4 bits, of embeddings in 8. Needs no data."""

    name: ClassVar[str] = "weight-int4"
    precision: ClassVar[str] = "int4"
    schemes: ClassVar[tuple[Scheme, ...]] = ("int4",)

    block: int = 32

    def plan(self, source: Source) -> Plan:
        """Return the plan: 8 bits for embeddings, 4 for everything else."""
        return with_embeddings(source, super().plan(source))


@dataclass(frozen=True)
class HalfRecipe(Recipe):
    """Half precision.

    Attributes:
        device: ``cuda``: weights and activations in half precision where that loses little, for GPUs; ``any``: weights
            are stored in half precision and computed with in float32, at float32's speed and half the size.
    """

    device: Literal["cuda", "any"] = "cuda"


@dataclass(frozen=True)
class BFloat16(HalfRecipe):
    """Half precision with float32's range and 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    precision: ClassVar[str] = "bf16"


@dataclass(frozen=True)
class Float16(HalfRecipe):
    """Half precision with 11 bits of precision; numbers beyond 65504 keep their layer in float32."""

    name: ClassVar[str] = "fp16"
    precision: ClassVar[str] = "fp16"


RECIPES: Mapping[str, type[Recipe]] = MappingProxyType(
    {kind.name: kind for kind in (StaticInt8, DynamicInt8, WeightInt8, WeightInt4, BFloat16, Float16)}
)
"""All recipes by name: those of ``--recipe``. The search tries plans instead, see ``search/families.py``."""

ENGINES: tuple[EngineName, ...] = ("onnxruntime", "openvino")


def installed() -> tuple[EngineName, ...]:
    """Return the installed engines."""
    return tuple(name for name in ENGINES if find_spec(name) is not None)


@dataclass(frozen=True)
class QuantConfig:
    """How to quantize.

    Examples:
        >>> config = ingot.QuantConfig(metric="accuracy:labels=label", max_drop=0.005, budget=120)
        >>> config.batches
        (1, 8, 32)

    Attributes:
        recipe: the recipe; None searches for the fastest plan that keeps the accuracy.
        metric: the measure of accuracy, see :func:`ingot.quant.metric.parse_metric`; None for the agreement with the
            original.
        max_drop: the largest drop of the metric: 0.005 is half a point of accuracy.
        keep: layers that stay in floating point in every candidate.
        batches: the batch sizes whose latency matters, by the geometric mean of their speed-ups.
        threads: CPU threads of a call; None for one per core.
        engines: those that may run the result; None for all that are installed. A recipe takes the first of them.
        budget: seconds for the search, whose best result is then used; None for no limit.
        seed: the seed of all sampling: the split of the data, and its selection.
        force: keep a recipe's result even if it is slower or exceeds the accuracy budget.
    """

    recipe: Recipe | None = None
    _: KW_ONLY
    metric: str | Callable[..., float] | None = None
    max_drop: float = 0.01
    keep: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 8, 32)
    threads: int | None = None
    engines: tuple[EngineName, ...] | None = None
    budget: float | None = None
    seed: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        if self.recipe is not None and not isinstance(self.recipe, Recipe):
            raise InvalidArgument(f"{self.recipe!r} is not a recipe; pass one such as StaticInt8(), or None to search")
        options.settle(self)
        options.check_drop(self.max_drop)
        options.check_threads(self.threads)
        if not self.batches or min(self.batches) < 1:
            raise InvalidArgument(f"the batch sizes are {list(self.batches)}; pass at least one, each 1 or more")
        if self.seed < 0:
            raise InvalidArgument(f"the seed is {self.seed}; it must be 0 or more")
        for engine in self.engines if self.engines is not None else ():
            if engine not in ENGINES:
                raise InvalidArgument(f"unknown engine '{engine}'; use {' or '.join(ENGINES)}")
        if self.engines == ():
            raise InvalidArgument("the list of engines is empty; leave it out for all installed engines")
        if self.budget is not None and not self.budget > 0:
            raise InvalidArgument(f"the time budget is {self.budget} s; it must be more than 0")


def embeddings(source: Source) -> tuple[str, ...]:
    """Return the names of a model's embeddings."""
    return tuple(layer.name for layer in source.layers if layer.operator == "Gather")


def with_embeddings(source: Source, plan: Plan) -> Plan:
    """Return a plan with embeddings in 8 bits.

    With one scale per row that is accurate enough, and embeddings are a large part of many models.
    """
    free = [name for name in fitting(source, "int8", embeddings(source)) if name not in plan.schemes]
    return plan.but(free, "int8") if plan.schemes else plan
