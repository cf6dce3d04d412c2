"""Rolls a version over the replicas of a model, a few at a time, and moves the alias once all of them answer by it.

Every replica follows an alias of a registry or a store. The alias moves last, so what it means is what new replicas
load, until all have proved the new version. Nothing is kept but what the replicas and the alias say themselves, so a
roll that was interrupted continues when it is run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import IngotError, InvalidArgument, Unavailable
from ingot.runtime.traffic.comparison import at_least
from ingot.server.clients.management import Management, model_path

_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
# Requests below which failures of a replica are not judged.
_FEW = 10


class Interrupted(Exception):
    """The user stopped a roll."""


class _Refused(Exception):
    """A replica cannot run the version, or runs it worse than is allowed."""


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version to roll.

    Attributes:
        model: as replicas serve it, with the alias that they follow: ``digits:prod``.
        version: the tag of the archive in the same repository.
        digest: the archive's.
        before: the digest that the alias has.
    """

    model: str
    version: str
    digest: str
    before: str

    def path(self, action: str) -> str:
        """Return the path of an action on the model: ``load`` or ``trial``."""
        return model_path(self.model, action)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How far a roll goes at once, and when it stops.

    Attributes:
        max_unavailable: replicas that are changed at once, less those that do not answer.
        pause: seconds after each of these steps, in which the changed replicas are watched.
        timeout: seconds for one replica.
        canary: parameters of a trial that each replica makes first; None to replace the version at once.
        errors: percent of its requests that a changed replica may fail; None for any.
    """

    max_unavailable: int = 1
    pause: float = 10.0
    timeout: float = 600.0
    canary: Mapping[str, Any] | None = None
    errors: float | None = None


@dataclass(frozen=True, kw_only=True)
class Replica:
    """What a replica says of the model.

    Attributes:
        place: of its management.
        digest: of the archive that answers; empty if the replica does not.
        state: of the model; or why there is none.
        ahead: whether its archive is not the alias's.
        candidate: the digest of an archive that is loaded to take over; empty if there is none.
        trial: of a candidate, if there is one.
    """

    place: str
    digest: str = ""
    state: str = ""
    ahead: bool = False
    candidate: str = ""
    trial: Mapping[str, Any] | None = None

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def tries(self, digest: str) -> bool:
        """Return whether it tries an archive now."""
        return self.trial is not None and self.trial["state"] == "running" and self.trial["digest"] == digest


async def look(servers: Iterable[Management], model: str) -> list[Replica]:
    """Return what each server says of a model, ``name:alias``; one that does not answer has the error as its state.

    Raises:
        InvalidArgument: one does not serve the model, or does not follow the alias.
    """
    return list(await asyncio.gather(*(_look(server, model) for server in servers)))


async def _look(server: Management, model: str) -> Replica:
    try:
        models = await server.ask("GET", "/v2/repository/status", timeout=_ANSWER_SECONDS)
    except Unavailable as error:
        return Replica(place=server.place, state=str(error))
    try:
        return _replica(server.place, models, model)
    except (LookupError, TypeError, AttributeError):
        return Replica(place=server.place, state="its answer is not that of an Ingot server of this version")


def _replica(place: str, models: Any, model: str) -> Replica:
    found = next((each for each in models if f"{each['name']}:{each['version']}" == model), None)
    if found is None or not found["follows"]:
        served = ", ".join(f"{each['name']}:{each['version']}" for each in models) or "no model"
        raise InvalidArgument(f"the replica {place} does not follow '{model}'; it serves {served}")
    return Replica(
        place=place,
        digest=found["digest"],
        state=found["state"],
        ahead=found["ahead"],
        candidate=(found["candidate"] or {}).get("digest", ""),
        trial=found["trial"],
    )


@dataclass(kw_only=True)
class Roll:
    """One run over all replicas.

    Args:
        servers: their management.
        what: the version.
        policy: the limits.
        move: points the alias at the version.
        say: reports a step.
        stop: set by the user, to stop between two replicas.
    """

    servers: Sequence[Management]
    what: Version
    policy: Policy
    move: Callable[[], object]
    say: Callable[[str], None]
    stop: asyncio.Event
    _changed: set[str] = field(default_factory=set)
    _counted: dict[str, tuple[int, int]] = field(default_factory=dict)

    async def run(self) -> None:
        """Change all replicas, then move the alias.

        Raises:
            TagMoved: somebody else moved the alias; the replicas stay ahead of it until it moves again.
            Unavailable: a replica could not be changed, or failed afterwards; those that were changed are back.
            Unavailable: too many replicas do not answer; those that were changed stay so.
            Interrupted: the user stopped it; those that were changed stay so.
        """
        try:
            while batch := await self._next():
                results = await asyncio.gather(*(self._change(each) for each in batch), return_exceptions=True)
                faults = [each for each in results if isinstance(each, BaseException)]
                self._changed.update(each.place for each in batch)
                for fault in sorted(faults, key=lambda each: isinstance(each, Interrupted)):
                    raise fault
                await self._watch()
        except _Refused as error:
            raise Unavailable(f"{error}. {await self._return()}") from error
        await asyncio.to_thread(self.move)
        # Now no longer ahead of the alias; otherwise one that soon moved back would not have moved in their eyes.
        await asyncio.gather(*map(self._load, self.servers))

    async def _load(self, server: Management) -> None:
        await server.ask("POST", self.what.path("load"), {"parameters": {"version": self.what.version}})

    async def _next(self) -> list[Management]:
        """Return the replicas to change now; empty if all are changed."""
        if self.stop.is_set():
            raise Interrupted
        found = await look(self.servers, self.what.model)
        self._check(found)
        down = [each for each in found if not each.ready]
        todo = [each.place for each in found if each.ready and each.digest != self.what.digest]
        if not todo and not down:
            return []
        room = self.policy.max_unavailable - len(down)
        if room < 1 or not todo:
            reasons = "; ".join(f"{each.place}: {each.state}" for each in down)
            raise Unavailable(
                f"{len(down)} of {len(found)} replicas are not ready, so no further one is changed ({reasons})"
            )
        return [each for each in self.servers if each.place in todo[:room]]

    def _check(self, found: Iterable[Replica]) -> None:
        """Check that the replicas that this roll has changed still run the version."""
        for each in found:
            if each.place in self._changed and (not each.ready or each.digest != self.what.digest):
                now = each.digest[:19] if each.ready else each.state
                raise _Refused(
                    f"the replica {each.place} was changed, but is not at version {self.what.version}: {now}"
                )

    async def _change(self, server: Management) -> None:
        """Let one replica run the version."""
        self.say(f"{server.place}  changing")
        try:
            async with asyncio.timeout(self.policy.timeout):
                if self.policy.canary is None:
                    await self._load(server)
                else:
                    await self._try(server, self.policy.canary)
        except TimeoutError as error:
            raise _Refused(f"the replica {server.place} was not changed {await self._state_of(server)}") from error
        except (IngotError, _Refused) as error:
            raise _Refused(f"the replica {server.place} was not changed: {error}") from error
        if self.policy.errors is not None:
            self._counted[server.place] = await self._counts(server)
        self.say(f"{server.place}  runs version {self.what.version}")

    async def _try(self, server: Management, canary: Mapping[str, Any]) -> None:
        """Let one replica try the version, until its own limits decide."""
        path = self.what.path("trial")
        [replica] = await look([server], self.what.model)
        if not replica.tries(self.what.digest):  # an earlier run may have begun it
            await server.ask("POST", path, {"version": self.what.version, **canary})
        while True:
            [replica] = await look([server], self.what.model)
            if replica.digest == self.what.digest:
                return
            if replica.ready and not replica.tries(self.what.digest):
                raise _Refused((replica.trial or {}).get("reason") or "its trial was stopped by another client")
            if await self._stopped(_LOOK_SECONDS):
                await server.ask("DELETE", path)
                raise Interrupted

    async def _watch(self) -> None:
        """Look at the changed replicas for the pause."""
        end = asyncio.get_running_loop().time() + self.policy.pause
        while True:
            self._check(await look(self.servers, self.what.model))
            for server in self.servers:
                if server.place in self._counted and self.policy.errors is not None:
                    await self._judge(server, self.policy.errors)
            left = end - asyncio.get_running_loop().time()
            if left <= 0 or await self._stopped(min(_LOOK_SECONDS, left)):
                return

    async def _judge(self, server: Management, most: float) -> None:
        """Check the share of requests that a changed replica has failed since it was changed."""
        counts = zip(await self._counts(server), self._counted[server.place], strict=True)
        total, failed = (now - then for now, then in counts)
        if total >= _FEW and at_least(failed, total) > most:
            raise _Refused(
                f"the replica {server.place} failed {failed} of {total} requests since the change; {most:g} % are "
                "allowed"
            )

    async def _counts(self, server: Management) -> tuple[int, int]:
        """Return how many requests a replica's model has had, and failed."""
        name, _, alias = self.what.model.partition(":")
        path = f"/v2/models/{name}/versions/{alias}/stats"
        try:
            [found] = (await server.ask("GET", path, timeout=_ANSWER_SECONDS))["model_stats"]
            good, bad = (int(found["inference_stats"][kind]["count"]) for kind in ("success", "fail"))
        except (IngotError, LookupError, TypeError, ValueError) as error:
            raise _Refused(f"the replica {server.place} was changed, and does not answer: {error}") from error
        return good + bad, bad

    async def _return(self) -> str:
        """Let all replicas run what the alias means, and return a sentence about that."""
        if self.what.digest == self.what.before:
            return "The alias means this version, so the other replicas keep it"
        left = []
        for server, found in zip(self.servers, await look(self.servers, self.what.model), strict=True):
            tries = found.tries(self.what.digest)
            if not tries and self.what.digest not in (found.digest, found.candidate):
                continue
            try:
                if tries:
                    await server.ask("DELETE", self.what.path("trial"))
                await server.ask("POST", self.what.path("load"), {})
                self.say(f"{server.place}  is back at what the alias means")
            except IngotError as error:
                left.append(f", but {server.place} is not: {error}")
        return "The replicas are back at what the alias means" + "".join(left)

    async def _state_of(self, server: Management) -> str:
        [replica] = await look([server], self.what.model)
        seen = ""
        if replica.trial is not None and replica.tries(self.what.digest):
            answered = replica.trial["requests"]["candidate"]["answered"]
            seen = f"; the candidate got {answered} requests, and each step needs 50"
        return f"in {self.policy.timeout:g} s{seen}"

    async def _stopped(self, seconds: float) -> bool:
        """Wait, and return whether the user stops the roll meanwhile."""
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True
