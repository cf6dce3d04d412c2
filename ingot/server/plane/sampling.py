"""How a request wants tokens to be chosen, from the fields of its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import InvalidArgument, InvalidField, quoted
from ingot.model_store import Generation
from ingot.runtime.generation.requests import MOST_LOGPROBS, Sampling, own_values
from ingot.server.plane.fields import Fields, texts_of

_MOST_STOPS, _LONGEST_STOP = 16, 1000
_MOST_IDS = 256
# Of seeds: those of other servers' clients are signed.
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Choosing:
    """How tokens are chosen, and what ends an answer, in addition to the number of tokens."""

    sampling: Sampling
    stops: tuple[str, ...]
    stop_ids: frozenset[int]


def choosing(fields: Fields, generation: Generation) -> Choosing:
    """Read how tokens are chosen; a request that says nothing gets what ``generate()`` of transformers does.

    A request samples if it names a temperature over 0, or, without a temperature, limits the choice by ``top_p``,
    ``top_k`` or ``min_p``.

    Raises:
        InvalidField: a value is wrong.
    """
    return Choosing(_sampling(fields, generation), _stops(fields), _stop_ids(fields, generation))


def _sampling(fields: Fields, generation: Generation) -> Sampling:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {name: value for name in names if (value := fields.number(name)) is not None}
    top_k, seed = fields.whole("top_k"), fields.whole("seed")
    if top_k is not None:
        given["top_k"] = max(top_k, 0) if top_k >= -1 else top_k  # -1 is all tokens in other servers
    limits = {"top_p": 1, "top_k": 0, "min_p": 0}
    limited = any(given.get(name, off) != off for name, off in limits.items())
    samples = generation.defaults.do_sample or limited or "temperature" in given
    values: dict[str, Any] = own_values(generation, samples=samples)
    return _checked({**values, **given, "seed": None if seed is None else seed % _SEEDS}, fields.where)


def _checked(values: Mapping[str, Any], where: str) -> Sampling:
    """Return the choice of tokens with these values.

    Raises:
        InvalidField: one is outside of its range.
    """
    try:
        return Sampling(**values)
    except InvalidArgument as error:
        _, name, message = str(error).split("'", 2)
        raise InvalidField(f"{where}{name}", message.strip()) from error


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.any("stop")
    if given is None or given == []:
        return ()
    stops = texts_of(f"{fields.where}stop", given, _MOST_STOPS)
    if not all(0 < len(stop) <= _LONGEST_STOP for stop in stops):
        raise InvalidField(f"{fields.where}stop", f"must have texts of 1 to {_LONGEST_STOP} characters")
    return tuple(stops)


def _stop_ids(fields: Fields, generation: Generation) -> frozenset[int]:
    given, ignored = fields.any("stop_token_ids") or [], fields.flag("ignore_eos")
    if not isinstance(given, list) or len(given) > _MOST_IDS or not all(type(number) is int for number in given):
        raise InvalidField(
            f"{fields.where}stop_token_ids", f"is {quoted(given)}; it must be a list of at most {_MOST_IDS} ids"
        )
    return frozenset(given) | frozenset(() if ignored else generation.eos)


def top_count(fields: Fields, name: str) -> int | None:
    """Return how many of the most likely tokens are asked for at each place; None if it is missing.

    Raises:
        InvalidField: it is not from 0 to 20.
    """
    count = fields.whole(name)
    if count is not None and not 0 <= count <= MOST_LOGPROBS:
        raise InvalidField(name, f"is {count}; it must be from 0 to {MOST_LOGPROBS}")
    return count
