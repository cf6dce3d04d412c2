"""What becomes of the settings in ``config.pbtxt`` that the import does not read: a note for each."""

from __future__ import annotations

from collections.abc import Iterator

from ingot.importing.triton_config_pb2 import ModelConfig, ModelDynamicBatching, ModelQueuePolicy, ModelSequenceBatching

# Triton's settings of a server, and what replaces each here.
_SERVING = {
    "instance_group": "see --instances and --device of ingot serve",
    "version_policy": "ingot serve loads the version that is named, or the highest",
    "optimization": "engines optimize as they load",
    "model_warmup": "ingot serve warms models up by itself",
    "response_cache": "see --cache of ingot serve",
    "model_transaction_policy": "each request has one response; see --repeat of ingot serve for several",
    "model_operations": "see --ort-library of ingot serve for libraries of custom operators",
    "ensemble_scheduling": "it belongs to ensembles",
}
_DYNAMIC = {
    "preferred_batch_size": "the size of batches follows from measured times; see --max-batch for the largest",
    "max_queue_delay_microseconds": "see --max-delay of ingot serve",
    "preserve_ordering": "responses to different requests come in any order; match them by their id",
    "priority_levels": "a request's priority is any whole number from 1, the most urgent",
    "default_priority_level": "a request without a priority, or with 0, is the least urgent",
    "priority_queue_policy": "all priorities share one queue; see --max-queue of ingot serve",
}
_QUEUE = {
    "default_timeout_microseconds": "see --slo of ingot serve",
    "allow_timeout_override": "the timeout of a request always replaces the default, --slo",
    "max_queue_size": "see --max-queue of ingot serve",
}
_SEQUENCES = {
    "max_sequence_idle_microseconds": "see --sequence-timeout of ingot serve",
    "direct": "sequences share batches and are not bound to an instance",
    "oldest": "sequences share batches; see --max-sequences and --max-delay of ingot serve",
}
_SHOWN = 20


def notes(message: ModelConfig) -> Iterator[str]:
    """Yield a note for each setting."""
    if message.max_batch_size > 0:
        yield f"max_batch_size {message.max_batch_size} is not imported: ingot serve has --max-batch"
    if message.HasField("dynamic_batching"):
        yield from _of(message.dynamic_batching, "dynamic_batching", _DYNAMIC)
    if message.HasField("sequence_batching"):
        yield from _listed(message.sequence_batching, "sequence_batching", _SEQUENCES)
    yield from _listed(message, "", _SERVING)
    names = sorted(message.parameters)
    for name in names[:_SHOWN]:
        yield f"the parameter '{name[:100]}' is not imported: it is a setting of Triton's backend"
    if len(names) > _SHOWN:
        yield f"{len(names) - _SHOWN} more parameters are not imported"


def _of(batching: ModelDynamicBatching, name: str, known: dict[str, str]) -> Iterator[str]:
    found = [*_listed(batching, name, known)]
    if batching.HasField("default_queue_policy"):
        found += _queue(batching.default_queue_policy, f"{name}.default_queue_policy")
    yield from found or [f"{name} is not imported: ingot serve batches requests by itself"]


def _queue(policy: ModelQueuePolicy, name: str) -> Iterator[str]:
    if policy.timeout_action == ModelQueuePolicy.DELAY:
        yield f"{name}.timeout_action DELAY is not imported: a request that exceeds its timeout fails"
    elif policy.default_timeout_microseconds or policy.allow_timeout_override:
        yield f"{name}.timeout_action REJECT holds here: a request that would exceed its timeout is refused on arrival"
    yield from _listed(policy, name, _QUEUE)


def _listed(
    message: ModelConfig | ModelDynamicBatching | ModelQueuePolicy | ModelSequenceBatching,
    within: str,
    known: dict[str, str],
) -> Iterator[str]:
    present = {field.name for field, _ in message.ListFields()}
    for name, instead in known.items():
        if name in present:
            yield f"{within + '.' if within else ''}{name} is not imported: {instead}"
