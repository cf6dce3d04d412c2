"""What each step of a decoder does: which rows it extends, and which parts of prompts it reads.

The policy has no clock, thread or engine. Its rows are those of the engine's cache, kept compact: all but the last one
are extended by a token in each step. The last one may hold too small a part of its prompt for that.

A prompt is read without its last token, by which its row is then extended, with the others, in the same step: so the
graph needs to return no logits of prompts that are read together. The rest of a single prompt is read with its last
token, and its first token does not wait for those of the other rows: they are extended in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ingot.errors import InvalidArgument
from ingot.report.units import counted
from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.engines.decoder.step import Chosen, Chunk, Move, Source, Step
from ingot.runtime.generation.prefixes import Prefixes
from ingot.runtime.generation.requests import GenerationRequest, Token
from ingot.runtime.generation.row import Row
from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.queue import Clients, check_room
from ingot.tensors import Array

MOST_READ = 1024
"""Most tokens of prompts that a step reads: a request is dropped between steps, so they must not take long."""


class Event(NamedTuple):
    """A token of a row, and why it ends the row's answer; None if another follows. A stop token is None."""

    row: Row
    token: Token | None
    reason: Literal["stop", "length"] | None


class Policy:
    """Decides what each step does. One step runs at a time: call :meth:`finish` or :meth:`fail` before :meth:`plan`.

    Clients enter by least use, counted in tokens, as they do in the queues of other models.

    Args:
        options: rows of the cache, and what each has room for.
        limits: of the queue.

    Attributes:
        share: most tokens of prompts that a step reads while it extends rows, for which these wait.
        read: tokens of prompts that were read; its reader resets it.
        reused: tokens of prompts that were not read, since another row held them; its reader resets it.
    """

    def __init__(self, options: DecoderOptions, limits: Limits):
        self.share = MOST_READ
        self.read = self.reused = 0
        self._slots = slots = options["slots"]
        self._context = options["context"]
        self._vocab = options["vocab"]
        self._source = options["source"]
        self._start = np.array(options["start"], np.int64)
        self._limits = limits
        self._rows: list[Row] = []
        self._prefixes = Prefixes(slots)
        self._clients = Clients(0)
        self._waiting: dict[Entry, Row] = {}
        self._nbytes = 0
        self._numbers = 0
        self._stepping: list[Row] = []  # of the running step, in the order of its choices
        self._paused = 0  # tokens that were read since the other rows were extended

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the prompts that wait."""
        return self._nbytes

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the cache."""
        return self._rows

    def offer(self, request: GenerationRequest, seed: int) -> Row:
        """Queue a request; ``seed`` is that of its random numbers if it names none.

        Raises:
            InvalidArgument: the prompt has unknown tokens, or does not fit a slot with the answer.
            Unavailable: the queue is full.
        """
        prompt, source = request.prompt, None
        if self._source:
            prompt, source = self._start, prompt
            self._check_source(source)
        most = self._most(request, prompt)
        row = Row(
            request, prompt, source, most, seed if request.sampling.seed is None else request.sampling.seed % (1 << 64)
        )
        entry = row.entry
        check_room(self._limits, self.waiting, self._nbytes, entry.nbytes, request.client, self._clients.held)
        self._numbers += 1
        entry.number, entry.due = self._numbers, float(self._numbers)
        self._waiting[entry] = row
        self._nbytes += entry.nbytes
        self._clients.put(entry)
        return row

    def _check_source(self, source: Array) -> None:
        self._check_tokens(source)
        if source.size > self._source:
            raise InvalidArgument(
                f"the text has {counted(source.size, 'token')}; the encoder reads {self._source}: shorten it, or raise "
                "--context of the server if the model knows more positions"
            )

    def _check_tokens(self, tokens: Array) -> None:
        least, largest = int(tokens.min()), int(tokens.max())
        if least < 0 or largest >= self._vocab:
            wrong = least if least < 0 else largest
            raise InvalidArgument(
                f"the prompt has the token {wrong}; the model knows those from 0 to {self._vocab - 1}"
            )

    def _most(self, request: GenerationRequest, prompt: Array) -> int:
        count = prompt.size
        self._check_tokens(prompt)
        most = self._context - count if request.max_tokens is None else request.max_tokens
        if most < 1 or count + most > self._context:
            wanted = "" if request.max_tokens is None else f", and 'max_tokens' {most} more"
            raise InvalidArgument(
                f"the prompt has {counted(count, 'token')}{wanted}; together they may have {self._context}: shorten "
                "the prompt, lower 'max_tokens', or raise --context of the server if the model knows more positions"
            )
        return most

    def cancel(self, row: Row) -> None:
        """Drop a request that waits, or free its row before the next step."""
        row.over = True
        if row.waiting:
            self._dequeue(row)

    def _dequeue(self, row: Row) -> None:
        row.waiting = False
        self._clients.remove(row.entry)
        del self._waiting[row.entry]
        self._nbytes -= row.entry.nbytes

    def plan(self) -> Step | None:
        """Return the next step; None if there is nothing to do."""
        moves = self._leave()
        budget = MOST_READ if all(row.entering for row in self._rows) else max(self.share - self._paused, 0)
        chunks = self._enter(budget, moves)
        if not self._rows:
            return None
        alone = len(chunks) == 1 and not self._paused and chunks[0].tokens.size < budget
        alone = alone and not self._rows[chunks[0].row].entering
        others = [row for row in self._rows if not row.entering]
        extended = self._stepping = [self._rows[chunks[0].row]] if alone else others
        self._paused = chunks[0].tokens.size + 1 if alone and len(others) > 1 else 0
        sources = self._sources()
        self.read += sum(chunk.tokens.size for chunk in chunks) + sum(not row.answer for row in extended)
        self.read += sum(source.tokens.size for source in sources or ())
        wanted = [row.request.logprobs for row in extended if row.request.logprobs is not None]
        choices, top = [row.choice for row in extended], max(wanted, default=-1)
        if alone:
            whole = chunks[0]._replace(tokens=extended[0].prompt[chunks[0].start :])
            return Step(moves=moves, sources=sources, chunks=[whole], choices=choices, top=top)
        return Step(
            moves=moves,
            sources=sources,
            chunks=chunks,
            tokens=np.array([row.latest for row in extended], np.int64),
            lengths=np.array([row.length for row in extended], np.int64),
            choices=choices,
            top=top,
        )

    def _sources(self) -> list[Source] | None:
        """Return the sources of new rows."""
        if not self._source:
            return None
        found = []
        for place, row in enumerate(self._rows):
            if row.source is not None and not row.encoded:
                found.append(Source(place, row.source))
                row.encoded = True
        return found

    def _leave(self) -> list[Move]:
        """Free the rows that are over, the last one first."""
        moves: list[Move] = []
        for place in range(len(self._rows) - 1, -1, -1):
            if self._rows[place].over:
                moves += self._free(place)
        return moves

    def _free(self, place: int) -> list[Move]:
        """Free a row: the last one takes its place, and one that is entering stays the last."""
        rows, moves = self._rows, []
        self._prefixes.note(len(rows) - 1, rows[-1].held, rows[-1].request.client)
        places = [len(rows) - 2, len(rows) - 1] if rows[-1].entering else [len(rows) - 1]
        for source in places:
            if source > place:
                moves.append(Move(source, place, rows[source].length))
                rows[place], place = rows[source], source
        del rows[place]
        return moves

    def _enter(self, budget: int, moves: list[Move]) -> list[Chunk]:
        """Return the parts of prompts to read: of the row that is entering, and then of those that wait.

        The beginning of a prompt that another row holds is copied, by a further move.
        """
        begun: dict[Row, int] = {}
        while budget:
            if not (self._rows and self._rows[-1].entering) and not self._admit(begun, moves):
                break
            row = self._rows[-1]
            begun[row] = row.read
            row.read = min(row.read + budget, row.prompt.size - 1)
            cost = row.read - begun[row] + (0 if row.encoded or row.source is None else row.source.size)
            budget -= min(budget, cost)  # an encoder reads its source in one call
            self._clients.charge(row.entry, cost)
        self._sort([row for row, start in begun.items() if not (start or row.entering)])
        places = [(place, row) for place, row in enumerate(self._rows) if begun.get(row, row.read) < row.read]
        return [Chunk(place, begun[row], row.prompt[begun[row] : row.read]) for place, row in places]

    def _admit(self, begun: Mapping[Row, int], moves: list[Move]) -> bool:
        """Give a row to the next request that waits; return whether there is one, and it can begin in this step."""
        if len(self._rows) == self._slots or not self._waiting:
            return False
        row, place = self._waiting[self._clients.first()], len(self._rows)
        # Of two sources, equal tokens have different keys.
        source, count = self._prefixes.find(row.request, self._rows) if row.source is None else (0, 0)
        if count and source < place:
            other = self._rows[source]
            if begun.get(other, other.read) < other.read:
                return False  # it is copied in the next step, when the other row has read it
        if count and source != place:
            moves.append(Move(source, place, count))
        row.read = count
        self.reused += count
        self._dequeue(row)
        self._rows.append(row)
        return True

    def _sort(self, rows: Sequence[Row]) -> None:
        """Exchange rows whose whole prompts a step reads, so that adjacent ones have similar lengths."""
        places = sorted(map(self._rows.index, rows))
        for place, row in zip(places, sorted(rows, key=lambda row: row.read), strict=True):
            self._rows[place] = row

    def finish(self, chosen: Chosen) -> list[Event]:
        """Return the tokens of the step that has run; rows whose answers they end are free for the next step."""
        rows, self._stepping = self._stepping, []
        return [self._advanced(row, chosen, place) for place, row in enumerate(rows) if not row.over]

    def _advanced(self, row: Row, chosen: Chosen, place: int) -> Event:
        token = int(chosen.tokens[place])
        row.answer.append(token)
        self._clients.charge(row.entry, 1)
        if token in row.request.stop_ids:
            row.over = True
            return Event(row, None, "stop")
        row.over = len(row.answer) == row.most
        return Event(row, _token(row, chosen, place), "length" if row.over else None)

    def fail(self) -> list[Row]:
        """Free all rows, as the step failed and the cache may be lost; return those that are not over."""
        rows, self._rows, self._stepping = self._rows, [], []
        self._prefixes = Prefixes(self._slots)
        return [row for row in rows if not row.over]


def _token(row: Row, chosen: Chosen, place: int) -> Token:
    wanted = row.request.logprobs
    if wanted is None:
        return Token(row.answer[-1])
    top = zip(chosen.top_tokens[place].tolist(), chosen.top_logprobs[place].tolist(), strict=True)
    return Token(row.answer[-1], float(chosen.logprobs[place]), tuple(top)[:wanted])
