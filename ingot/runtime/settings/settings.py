"""How models are run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ingot.model_store import ServingDefaults
from ingot.runtime.machine import devices
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.settings.canary import Plan
from ingot.runtime.settings.repeat import Repeat

VariantChoice = Literal["measured", "preferred"]
Isolate = Literal["auto", "all", "none"]
CudaGraphs = Literal["auto", "on", "off"]
ConvolutionOptions = Literal["auto", "default", "nhwc", "heuristic"]
GpuArena = Literal["doubled", "exact"]


@dataclass(frozen=True, kw_only=True)
class SequenceLimits:
    """How much state is kept for one model.

    Attributes:
        sequences: most open ones.
        nbytes: most bytes of their states.
        idle: seconds without a request after which a sequence is dropped.
        waiting: most requests that wait for earlier ones of their sequences.
    """

    sequences: int = 1024
    nbytes: int = 256 << 20
    idle: float = 60.0
    waiting: int = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are run.

    ``device`` is ``auto``, ``cpu``, ``cuda``, or a kind of device with indices, such as ``cuda:0,1``. On each device,
    ``instances`` engines run side by side, which share the CPU cores; on a GPU, each has up to ``lanes`` batches in
    flight. ``cuda_graphs`` selects the engines that capture batches as CUDA graphs: ``on``, all that can, or ``auto``,
    those of PyTorch. ``convolutions`` and ``gpu_arena`` are options of ONNX Runtime on a GPU.
    ``engine`` runs every graph; None is the engine that a variant names, or else ONNX Runtime.
    ``shards`` is the number of processes, each with its own GPU if there are any, over which one copy of a model is
    divided.
    ``allow_code`` loads variants of formats that can run their author's code.
    ``ort_library`` is a native library of custom operators for ONNX Runtime.
    ``variant_choice`` selects the served variant where none is named, among those that run here: ``measured``, the
    fastest, or ``preferred``, the archive's first. ``choice_time`` is how many seconds each variant is timed at each
    batch size, if needed. ``derived_cache`` keeps the packed weights of large models next to their store.
    ``slo`` is the number of seconds within which requests without a timeout are to be answered; None is unlimited.
    ``engine_threads`` is the number of CPU threads per engine call; None measures the best number.
    ``max_answer_bytes`` limits the outputs of one request, ``max_call_bytes`` the memory of an engine call,
    and ``engine_call_mb`` that of one in an engine process whose memory cannot be predicted.
    ``warm_time`` is how many seconds batch sizes are timed before a model is ready.
    ``isolate`` selects the models whose engines run in separate processes: ``all``, ``none``, or ``auto``, those
    that are not proved harmless. ``engine_memory_mb`` is the most private memory of such a process; None is unlimited.
    ``slots`` is how many requests for tokens a decoder answers at a time, ``context`` the most tokens of each, prompt
    and answer (None for those that the model knows, up to 2048), and ``prompt_delay`` how many seconds a step may read
    the prompts of others while answers wait for it.
    ``states`` are inputs that the server keeps between the requests of a sequence, each with the output that is its
    next value, and ``sequences`` limits them. ``repeat`` is how the model runs again after each answer.
    ``labels`` is a file with the names of classes, in the order of an output's values.
    ``canary`` is how a new version is tried before it takes over; without steps, it takes over at once.
    ``verify_batches`` is the share of batches whose requests run again, each alone, to compare the answers.
    ``cache_bytes`` is the memory for responses that answer equal requests again; 0 for none.
    ``install_requirements`` is whether packages that a model in Python requires are installed for it.
    ``permissions`` are what the processes of models in Python may do besides computing.
    ``model_settings`` are the values that a model in Python gets as its settings.
    ``memory_budget`` is the most memory of models in bytes, by kind of device.
    ``load_timeout`` is how many seconds such a process may take until its model is ready; None is unlimited.
    """

    device: str = "auto"
    instances: int = 1
    lanes: int = 3
    cuda_graphs: CudaGraphs = "auto"
    convolutions: ConvolutionOptions = "auto"
    gpu_arena: GpuArena = "doubled"
    shards: int = 1
    engine: str | None = None
    limits: Limits = field(default_factory=Limits)
    allow_code: bool = False
    ort_library: Path | None = None
    variant_choice: VariantChoice = "measured"
    choice_time: float = 0.3
    derived_cache: bool = True
    slo: float | None = None
    max_answer_bytes: float = math.inf
    max_call_bytes: float = math.inf
    engine_call_mb: int = 2048
    warm_time: float = 0.1
    engine_threads: int | None = None
    isolate: Isolate = "auto"
    engine_memory_mb: int | None = None
    load_timeout: float | None = None
    slots: int = 16
    context: int | None = None
    prompt_delay: float = 0.2
    states: Mapping[str, str] = field(default_factory=dict)
    sequences: SequenceLimits = field(default_factory=SequenceLimits)
    repeat: Repeat = field(default_factory=Repeat)
    labels: Path | None = None
    canary: Plan = field(default_factory=Plan)
    verify_batches: float = 0.0
    cache_bytes: int = 0
    install_requirements: bool = False
    permissions: tuple[str, ...] = ()
    model_settings: Mapping[str, str] = field(default_factory=dict)
    memory_budget: Mapping[str, int] = field(default_factory=dict)

    def completed(self, defaults: ServingDefaults | None) -> Settings:
        """Return these settings, with an archive's where there are none."""
        if defaults is None:
            return self
        repeat = self.repeat
        if not repeat.inputs:
            repeat = replace(repeat, inputs=defaults.repeat, until=repeat.until or defaults.repeat_until)
        return replace(self, states=self.states or defaults.states, repeat=repeat)

    @property
    def devices(self) -> list[str]:
        """The devices over which the engines are spread; those of a divided model are one."""
        return devices.spread(self.device) if self.shards == 1 else [self.device]

    @property
    def threads(self) -> int:
        """CPU threads per engine call: the configured number, or an instance's share of the cores."""
        engines = self.instances * len(self.devices) * self.shards
        return self.engine_threads or max(1, devices.cpu_count() // engines)
