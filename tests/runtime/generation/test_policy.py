"""The policy, simulated: an engine of lists checks what every step finds in its rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ingot.errors import InvalidArgument, Unavailable
from ingot.model_store import Generation
from ingot.model_store.format.generation import Encoder
from ingot.runtime.engines.decoder.options import options_of
from ingot.runtime.engines.decoder.step import Chosen, Step, grouped
from ingot.runtime.generation.policy import MOST_READ, Policy
from ingot.runtime.generation.requests import GenerationRequest
from ingot.runtime.generation.row import Row
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.settings.settings import Settings

SLOTS, CONTEXT, VOCAB, STOP = 5, 64, 50, 3


def following(tokens: list[int]) -> int:
    """The token behind others."""
    return hash(tuple(tokens)) % VOCAB


def answer(prompt: list[int], most: int) -> list[int]:
    tokens = [*prompt]
    while len(tokens) < len(prompt) + most and (token := following(tokens)) != STOP:
        tokens.append(token)
    return tokens[len(prompt) :]


class Lists:
    """An engine whose cache is the tokens themselves."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(SLOTS)]
        self.sources: list[list[int]] = [[] for _ in range(SLOTS)]
        self.steps = self.calls = self.chunks = self.padding = 0

    def run(self, step: Step) -> Chosen:
        self.steps += 1
        for source, target, length in step.moves:
            assert len(self.rows[source]) >= length
            self.rows[target] = self.rows[source][:length]
            self.sources[target] = self.sources[source]
        for new in step.sources or ():
            self.sources[new.row] = new.tokens.tolist()
        tokens = []
        for group in grouped(step.chunks):
            width = max(len(chunk.tokens) for chunk in group)
            assert [chunk.row for chunk in group] == [*range(group[0].row, group[0].row + len(group))]
            assert len(group) == 1 or not any(chunk.start for chunk in group)
            self.padding += sum(width - len(chunk.tokens) for chunk in group)
            self.calls += 1
        for chunk in step.chunks:
            self.chunks += 1
            assert len(self.rows[chunk.row]) >= chunk.start
            del self.rows[chunk.row][chunk.start :]
            self.rows[chunk.row] += chunk.tokens.tolist()
        for row, (token, length) in enumerate(zip(step.tokens, step.lengths, strict=True)):
            assert len(self.rows[row]) >= length
            del self.rows[row][length:]
            self.rows[row].append(int(token))
            tokens.append(following(self.sources[row] + self.rows[row]))
        if not len(step.tokens) and step.choices:
            (chunk,) = step.chunks
            tokens.append(following(self.rows[chunk.row]))
        assert len(tokens) == len(step.choices)
        return chosen(tokens)


def chosen(tokens: list[int]) -> Chosen:
    count = len(tokens)
    nothing = np.zeros((count, 0), np.float32)
    return Chosen(np.array(tokens, np.int64), np.zeros(0, np.float32), nothing, nothing, np.zeros(3))


def request(prompt: list[int], most: int | None = None, **more: object) -> GenerationRequest:
    stop = frozenset((STOP,))
    return GenerationRequest(prompt=np.array(prompt), max_tokens=most, stop_ids=stop, **more)  # type: ignore[arg-type]


def policy(slots: int = SLOTS, queue: int = 1000, encoder: Encoder | None = None) -> Policy:
    declared = Generation(layers=1, kv_heads=1, head_size=8, max_length=CONTEXT, vocab=VOCAB, encoder=encoder)
    return Policy(options_of(declared, Settings(slots=slots)), Limits(max_queue=queue))


@pytest.mark.parametrize("seed", range(20))
def test_random_arrivals_and_cancellations_disturb_no_row(seed: int) -> None:
    drawn, served, engine = random.Random(seed), policy(), Lists()
    served.share = drawn.choice((1, 5, MOST_READ))
    found: dict[Row, list[int]] = {}
    dropped: set[Row] = set()
    common = [[drawn.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    left = 150
    waited: dict[Row, int] = {}  # tokens of prompts that were read since a row was extended
    while left or len(served.rows) or served.waiting:
        while left and drawn.random() < 0.6:
            left -= 1
            prompt = [drawn.randrange(VOCAB) for _ in range(drawn.randint(1, 40))]
            prompt = [*drawn.choice(common)[: drawn.randint(0, 40)], *prompt][:40]
            found[served.offer(request(prompt, drawn.randint(1, 20), client=drawn.randrange(3)), 0)] = []
        if (step := served.plan()) is None:
            continue
        read = sum(len(chunk.tokens) for chunk in step.chunks)
        waited = {row: waited.get(row, 0) + read for row in served.rows if row.answer}
        assert all(tokens <= served.share for tokens in waited.values())
        assert len(served.rows) <= SLOTS
        assert [row.entering for row in served.rows[:-1]] == [False] * (len(served.rows) - 1)
        result = engine.run(step)
        for row in [*found]:
            if not row.over and drawn.random() < 0.01:
                served.cancel(row)
                dropped.add(row)
        for event in served.finish(result):
            waited.pop(event.row, None)
            assert event.row not in dropped
            found[event.row] += [] if event.token is None else [event.token.id]
    assert len(dropped) > 3
    assert engine.calls <= engine.chunks
    assert engine.padding <= 16 * (engine.chunks - engine.calls)
    assert served.reused > 30
    for row, tokens in found.items():
        expected = answer(row.request.prompt.tolist(), row.most)
        assert tokens == (expected[: len(tokens)] if row in dropped else expected)
    assert not served.nbytes


def test_rows_of_a_failed_step_are_freed_and_others_run() -> None:
    served, engine = policy(), Lists()
    rows = [served.offer(request([index]), 0) for index in range(SLOTS + 2)]
    served.plan()
    assert served.fail() == rows[:SLOTS]
    assert not served.rows
    step = served.plan()
    assert step is not None
    assert [event.row for event in served.finish(engine.run(step))] == rows[SLOTS:]


def test_a_long_prompt_is_read_in_parts_while_others_are_answered() -> None:
    served, engine = policy(), Lists()
    served.offer(request([1], 40), 0)
    first = served.plan()
    assert first is not None
    served.finish(engine.run(first))
    served.share = 8
    served.offer(request([2] * 30, 4), 0)
    parts: list[int] = []
    for _ in range(4):
        step = served.plan()
        assert step is not None
        assert len(step.tokens) == (0 if len(parts) == 3 else 1)  # with its last token it needs no other row
        parts += [len(chunk.tokens) for chunk in step.chunks]
        served.finish(engine.run(step))
    assert parts == [8, 8, 8, 6]


def test_prompts_that_enter_together_are_read_together_if_that_costs_less() -> None:
    served, engine = policy(), Lists()
    rows = [served.offer(request([index] * size, 1), 0) for index, size in enumerate((40, 3, 39, 2, 38))]
    step = served.plan()
    assert step is not None
    assert [[len(chunk.tokens) for chunk in group] for group in grouped(step.chunks)] == [[1, 2], [37, 38, 39]]
    assert len(served.finish(engine.run(step))) == len(rows)


def test_a_prompt_alone_is_read_with_its_last_token() -> None:
    served = policy()
    served.offer(request([1, 2, 4], 2), 0)
    step = served.plan()
    assert step is not None
    assert (step.chunks[0].tokens.tolist(), len(step.tokens), len(step.choices)) == ([1, 2, 4], 0, 1)
    assert served.read == 3


def test_equal_prompts_are_read_once_and_a_clients_own_alone() -> None:
    served, engine = policy(), Lists()
    prompt = [*range(4, 40)]
    rows = [served.offer(request(prompt, 2, client=client), 0) for client in (1, 1, 1, 2)]
    read = tokens = 0
    while (step := served.plan()) is not None:
        read += sum(len(chunk.tokens) for chunk in step.chunks)
        tokens += len(served.finish(engine.run(step)))
    assert read == 2 * 35  # by the last token each row is extended
    assert (served.read, served.reused) == (2 * 36 + 2 * 1, 2 * 35)
    assert tokens == 2 * len(rows)
    again = served.offer(request([*prompt, *rows[3].answer[:1], 5], 1, client=2), 0)
    step = served.plan()
    assert step is not None
    assert step.chunks[0].start in (0, 36, 37)
    assert again.read == 37


def test_clients_enter_by_least_use() -> None:
    served, engine = policy(slots=1), Lists()
    for _ in range(6):
        served.offer(request([1], 3, client="many"), 0)
    served.offer(request([1], 3, client="few"), 0)
    order: list[object] = []
    while (step := served.plan()) is not None:
        order += [event.row.request.client for event in served.finish(engine.run(step)) if event.reason]
    assert order.index("few") <= 1


def test_requests_of_higher_priority_begin_first() -> None:
    served, engine = policy(slots=1), Lists()
    rows = [served.offer(request([1, number], 1, priority=number % 3), 0) for number in range(6)]
    order: list[Row] = []
    while (step := served.plan()) is not None:
        order += [event.row for event in served.finish(engine.run(step))]
    assert [rows.index(row) for row in order] == [2, 5, 1, 4, 0, 3]


def test_requests_that_cannot_be_answered_are_refused() -> None:
    served = policy(queue=2)
    with pytest.raises(InvalidArgument, match=r"has 60 tokens, and 'max_tokens' 5 more; together they may have 64"):
        served.offer(request([1] * 60, 5), 0)
    with pytest.raises(InvalidArgument, match="has 64 tokens; together they may have 64"):
        served.offer(request([1] * 64), 0)
    with pytest.raises(InvalidArgument, match="has 1 token, and 'max_tokens' 64 more; together"):
        served.offer(request([1], 64), 0)
    with pytest.raises(InvalidArgument, match="the token 50; the model knows those from 0 to 49"):
        served.offer(request([1, 50]), 0)
    served.offer(request([1]), 0)
    served.offer(request([1]), 0)
    with pytest.raises(Unavailable, match="the queue is full"):
        served.offer(request([1]), 0)


@pytest.mark.parametrize("seed", range(10))
def test_each_row_keeps_its_source(seed: int) -> None:
    start, drawn, engine = 7, random.Random(seed), Lists()
    served = policy(encoder=Encoder(max_length=40, start=(start,)))
    served.share = drawn.choice((16, MOST_READ))
    found: dict[Row, list[int]] = {}
    dropped: set[Row] = set()
    left = 100
    while left or len(served.rows) or served.waiting:
        while left and drawn.random() < 0.6:
            left -= 1
            source = [drawn.randrange(VOCAB) for _ in range(drawn.choice((1, 20, 40)))]
            found[served.offer(request(source, drawn.choice((1, 20)), client=drawn.randrange(2)), 0)] = []
        step = served.plan()
        if step is None:
            continue
        for event in served.finish(engine.run(step)):
            found[event.row] += [] if event.token is None else [event.token.id]
        if drawn.random() < 0.1 and (running := [row for row in found if not row.over]):
            dropped.add(gone := drawn.choice(running))
            served.cancel(gone)
    for row, tokens in found.items():
        if row not in dropped:
            assert tokens == answer([*row.request.prompt.tolist(), start], row.most)


def test_a_source_that_does_not_fit_is_refused() -> None:
    served = policy(encoder=Encoder(max_length=40, start=(7,)))
    with pytest.raises(InvalidArgument, match="the text has 41 tokens; the encoder reads 40"):
        served.offer(request([1] * 41, 1), 0)
    with pytest.raises(InvalidArgument, match="the prompt has the token 50"):
        served.offer(request([VOCAB], 1), 0)
    served.offer(request([1] * 40, CONTEXT - 1), 0)
    with pytest.raises(InvalidArgument, match="'max_tokens' 64 more; together they may have 64"):
        served.offer(request([1], CONTEXT), 0)
