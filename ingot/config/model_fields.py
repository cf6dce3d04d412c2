"""The settings that each model of a server may have for itself, in its ``[[model]]``; server_fields.py has the others.

A running server changes them by loading models again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ingot.config.setting import BATCHING, CANARY, EXPERT, LIMITS, MODELS, setting
from ingot.permissions import NAMES, PERMISSIONS

_PERMISSION = "|".join(PERMISSIONS)
_field = partial(setting, per_model=True)
_canary = partial(_field, group=CANARY, file_only=True)


@dataclass(frozen=True, kw_only=True)
class ModelFields:
    """The settings. Each is an option and a variable, such as ``INGOT_MAX_BATCH``, unless it is ``file_only``."""

    device: str = _field(
        "auto",
        "Where models run: cpu, cuda:0,1 for two GPUs, or auto, the least busy GPU with enough memory if there is one",
        more="See [GPUs](../guides/serve/gpu.md).",
        group=MODELS,
        pattern=r"(auto|cpu|cuda|(?!auto|cpu)[a-z]\w*:\d+(,\d+)*)",
        form="auto, cpu, cuda, or cuda:0,1 with the indices of GPUs",
        common=True,
    )
    allow_code: bool = _field(
        False,
        "Load variants of formats that can run their author's code; ONNX cannot",
        more="See [formats that can run code](../guides/serve/serving.md#formats-that-can-run-code).",
        group=MODELS,
        common=True,
    )
    ort_library: Path | None = _field(
        None,
        "A library of custom operators for ONNX Runtime",
        more="It is [native code](../guides/make/custom-ops.md#onnx-runtime), and never comes from an archive.",
        group=MODELS,
        unset="none",
    )
    isolate: Literal["auto", "all", "none"] = _field(
        "auto",
        "Which models run in separate processes: auto (those that are not proved harmless), all or none",
        more="See [engine processes](../concepts/isolation.md).",
        group=MODELS,
    )
    engine_memory_mb: int | None = _field(
        None,
        "Most private memory of an engine process, in MiB",
        more="A request that needs more fails. See [engine processes](../concepts/isolation.md).",
        group=LIMITS,
        unset="no limit",
        least=128,
    )
    labels: Path | None = _field(
        None,
        "File with the names of classes, a line for each, in the order of an output's values",
        more="See [classes](../guides/serve/protocols.md#classes).",
        group=MODELS,
        unset="none",
    )
    variant_choice: Literal["measured", "preferred"] = _field(
        "measured",
        "Which variant of an archive is served if none is named: measured (the fastest here) or preferred (the first "
        "that runs)",
        more="See [variants](../guides/serve/serving.md#variants).",
        group=MODELS,
    )
    verify_batches: float = _field(
        0.001,
        "Share of the batches whose requests run again, each alone, to compare the answers; 0 for none",
        more="See [guard](../concepts/batching.md#guard).",
        group=BATCHING,
        least=0,
        most=1,
    )
    instances: int = _field(
        1,
        "Engines per model and device; they share the CPU cores",
        group=BATCHING,
        least=1,
        most=64,
        common=True,
    )
    lanes: int = _field(
        3,
        "Batches that an engine on a GPU has in flight, so that copies and computation overlap",
        more="See [GPUs](../guides/serve/gpu.md#lanes).",
        group=BATCHING,
        least=1,
        most=16,
    )
    cuda_graphs: Literal["auto", "on", "off"] = _field(
        "auto",
        "Capture batches on a GPU as CUDA graphs: auto (PyTorch's engines), on (ONNX Runtime too) or off",
        more="See [CUDA graphs](../guides/serve/gpu.md#cuda-graphs).",
        group=BATCHING,
    )
    convolutions: Literal["auto", "default", "nhwc", "heuristic"] = _field(
        "auto",
        "How ONNX Runtime computes convolutions on a GPU: auto (the fastest of the others, measured at load), default, "
        "nhwc (channels last) or heuristic (shorter planning)",
        more="See [convolutions](../guides/serve/gpu.md#convolutions).",
        group=EXPERT,
    )
    gpu_arena: Literal["doubled", "exact"] = _field(
        "doubled",
        "How ONNX Runtime's memory of a GPU grows: doubled, or exact (as much as a call needs)",
        more="See [memory](../guides/serve/gpu.md#memory).",
        group=EXPERT,
    )
    shards: int = _field(
        1,
        "Processes, each with its own GPU if there are any, over which one copy of a model is divided",
        more="Only of format `pt2`. See [models larger than a GPU](../guides/serve/sharding.md).",
        group=MODELS,
        least=1,
        most=64,
    )
    threads: int | None = _field(
        None,
        "CPU threads for one engine call",
        more="By default [as many as are worthwhile](../guides/serve/tune.md#threads).",
        group=BATCHING,
        unset="as many as are worthwhile",
        least=1,
        most=1024,
        common=True,
    )
    max_batch: int = _field(64, "Maximum number of samples per engine call", group=BATCHING, least=1, common=True)
    slo: float | None = _field(
        None,
        "Deadline of requests without a timeout, such as 50ms; requests that cannot meet it are refused",
        more="A twentieth of it is reserved for the transfer of the response to the client. "
        "See [deadlines](../concepts/batching.md#deadlines).",
        group=BATCHING,
        unset="no limit",
        above=0,
        most=3600,
        duration=True,
        needs_unit=True,
        common=True,
    )
    max_delay: float | None = _field(
        None,
        "Longest time that an idle engine waits for more samples, such as 2ms; 0 for no wait",
        group=BATCHING,
        unset="derived from the measured latencies",
        least=0,
        most=60,
        duration=True,
        needs_unit=True,
        common=True,
    )
    max_queue: int = _field(
        4096,
        "Maximum number of requests queued per model; more are refused",
        more="A request of more samples than `max_batch` is queued in parts, two per instance at a time; other "
        "requests that arrive meanwhile run between them.",
        group=LIMITS,
        least=1,
        common=True,
    )
    max_queue_mb: int = _field(
        256,
        "Maximum size of queued requests per model, in MiB",
        more="Large requests count with all their parts.",
        group=LIMITS,
        least=1,
    )
    max_answer_mb: int = _field(
        512,
        "Largest outputs of one request, in MiB as raw tensors; a request that asks for more is refused",
        more="A few bytes can ask for any amount: a size that is an input of the model, say. The limit is checked "
        "before an answer is encoded.",
        group=LIMITS,
        least=1,
    )
    max_call_mb: int | None = _field(
        None,
        "Most memory of one engine call in MiB; requests that need more are refused",
        more="Predicted from the sizes of the inputs; batches are not grown beyond it. Where values decide how much "
        "memory is needed, it limits what a call of the [engine process](../concepts/isolation.md) may add. "
        "See [memory](../guides/serve/memory.md).",
        group=LIMITS,
        unset="three quarters of the memory of the process, and 2048 where it cannot be predicted",
        least=1,
    )
    states: str | None = _field(
        None,
        "Inputs that the server keeps between the requests of a sequence, each with the output that is its next value",
        more="Such as `h=h_next,c=c_next`. See [sequences](../guides/serve/sequences.md#sequences).",
        group=MODELS,
        unset="none",
        pattern=r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*",
        form="pairs of an input and an output: h=h_next,c=c_next",
    )
    repeat: str | None = _field(
        None,
        "Run the model again after each answer, with these inputs from outputs, and send each answer",
        more="Such as `ids=next_ids`. See [several answers](../guides/serve/sequences.md#several-answers).",
        group=MODELS,
        unset="one answer",
        pattern=r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*",
        form="pairs of an input and an output: ids=next_ids",
    )
    repeat_until: str | None = _field(
        None,
        "The BOOL output that is true in the last answer of a model with --repeat",
        group=MODELS,
        unset="none",
    )
    max_steps: int = _field(256, "Most answers to a request of a model with --repeat", group=LIMITS, least=1)
    install_requirements: bool = _field(
        False,
        "Install the versions of packages that models in Python require, into separate folders",
        more="See [requirements](../guides/make/python-model.md#requirements).",
        group=MODELS,
    )
    permit: str | None = _field(
        None,
        f"Permissions of models in Python, for those that ask for them: {NAMES}",
        more="See [permissions](../guides/make/python-model.md#permissions).",
        group=MODELS,
        unset="nothing",
        pattern=f"({_PERMISSION})(,({_PERMISSION}))*",
        form=f"some of {NAMES}, separated by commas",
    )
    model_settings: str | None = _field(
        None,
        "Values that a model in Python gets as context.settings, as texts",
        more="Such as `language=en,beams=4`. See [a model in Python](../guides/make/python-model.md#settings).",
        group=MODELS,
        unset="none",
        pattern=r"[^=,]+=[^=,]*(,[^=,]+=[^=,]*)*",
        form="pairs of a name and a value: language=en,beams=4",
    )
    slots: int = _field(
        16,
        "Requests that a decoder, a model that generates tokens, answers at a time; others wait",
        group=BATCHING,
        least=1,
        most=1024,
    )
    context: int | None = _field(
        None,
        "Most tokens of a request to a decoder, prompt and answer; each slot has memory for them",
        group=BATCHING,
        unset="all positions that the model knows, up to 2048",
        least=2,
        most=1 << 20,
    )
    prompt_delay: float = _field(
        0.2,
        "How long answers of a decoder may wait for a part of another request's prompt",
        group=BATCHING,
        least=0,
        duration=True,
    )
    max_sequences: int = _field(1024, "Most open sequences of a model; more are refused", group=LIMITS, least=1)
    max_state_mb: int = _field(256, "Most memory of the states of a model's sequences in MiB", group=LIMITS, least=1)
    sequence_timeout: float = _field(
        60.0,
        "Time without a request after which a sequence is dropped",
        group=LIMITS,
        above=0,
        duration=True,
    )
    cache: str | None = _field(
        None,
        "Memory per model for responses that are sent again to equal requests, such as 64MB",
        more="See [response cache](../guides/serve/response-cache.md).",
        group=MODELS,
        unset="none",
        pattern=r"\d+(\.\d+)? ?[KMGT]i?B",
        form="a size: 64MB, or 0MB for none",
        common=True,
    )
    load_timeout: float = _field(
        300.0,
        "How long a model may take to load and to be tested and timed; 0 for no limit",
        more="After it the command ends with an error that names the model: a small graph can be made to load or run "
        "forever.",
        group=LIMITS,
        least=0,
        most=86400,
        duration=True,
    )
    engine: str | None = _field(
        None,
        "Engine of all ONNX graphs: onnxruntime, openvino, tensorrt, or one of a plug-in",
        unset="the one that a variant names, or else onnxruntime",
        more="A model whose goldens it does not reproduce is refused, and so are models of other formats. See "
        "[TensorRT](../guides/serve/gpu.md#tensorrt) and [plug-ins](../guides/serve/gpu.md#plug-ins).",
        group=EXPERT,
    )
    choice_time: float = _field(
        0.3,
        "How long each variant is timed per batch size, if timing is needed",
        group=EXPERT,
        above=0,
        most=60,
        duration=True,
    )
    derived_cache: bool = _field(
        True,
        "Keep packed weights of large models next to the store, where processes share them",
        more="See [large models](../guides/serve/serving.md#large-models).",
        group=EXPERT,
    )
    canary: str | None = _canary(
        None,
        "Shares of the requests in percent that a new version gets, step by step, before it takes over: 5,25,50",
        more="A step of 0 compares answers only. See [canary and shadow](../concepts/versions.md#canary-and-shadow).",
        unset="it takes over at once",
        pattern=r"(100|\d{1,2}(\.\d+)?)(,(100|\d{1,2}(\.\d+)?))*",
        form="percentages: 5,25,50",
    )
    canary_every: float = _canary(
        60.0,
        "Least time of a step",
        least=0,
        duration=True,
    )
    canary_errors: float | None = _canary(
        None,
        "Percent of the new version's requests that may fail before it is rolled back",
        unset="no limit",
        least=0,
        most=100,
    )
    canary_drift: float | None = _canary(
        None,
        "Percent of compared answers that may differ from the earlier version's before the new version is rolled back",
        unset="no limit",
        least=0,
        most=100,
    )
    canary_latency: float | None = _canary(
        None,
        "Highest ratio of the new version's p99 latency to the earlier version's before the new version is rolled back",
        unset="no limit",
        above=0,
    )
    canary_tolerance: float = _canary(
        0.01,
        "Largest error of an answer that does not differ, as a share of the largest value of the output",
        least=0,
    )
    canary_compare: float = _canary(
        10.0,
        "Percent of the requests that both versions answer, to be compared",
        least=0,
        most=100,
    )
    canary_sticky: bool = _canary(
        False,
        "Send all requests of a client to the same version",
    )
