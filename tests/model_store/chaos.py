"""Eight processes push, promote, roll back, remove, sign, collect and read, and are killed at random.

``python -m tests.model_store.chaos STORE SECONDS SEED`` prints the actions as JSON, and exits with 1 if a reader saw
something torn or the store is not whole in the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path

from ingot.errors import AlreadyExists, InvalidArchive, NotFound, TagMoved
from ingot.model_store import Archive, Store
from ingot.model_store.store.fsck import check
from ingot.model_store.store.gc import collect
from tests.model_store.samples import archive

WORKERS = 8
GRACE = timedelta(seconds=1)
MODELS = ("alpha", "team/beta")
ALIASES = ("prod", "canary")
ACTIONS = ("push", "push", "alias", "promote", "rollback", "remove", "attach", "collect", "read", "read", "read")
ARCHIVES: list[Archive] = [
    # Of several weights, so that a push can be killed halfway; each shares some with the next.
    archive(
        f"graph {number}".encode(), tuple(bytes([number // 4 + part]) * 200_000 for part in range(3))
    ).with_signature(b"signed when it was made")
    for number in range(40)
]


def act(store: Store, action: str, dice: random.Random) -> None:
    name, alias, item = dice.choice(MODELS), dice.choice(ALIASES), dice.choice(ARCHIVES)
    if action == "push":
        store.push(item, f"{name}:{ARCHIVES.index(item)}.0")
    elif action == "alias":
        store.push(item, f"{name}:{alias}")
    elif action == "promote":
        tags = store.tags(name)
        store.promote(f"{name}:{dice.choice(list(tags) or ['none'])}", alias, expect=tags.get(alias, "none"))
    elif action == "rollback":
        store.rollback(f"{name}:{alias}")
    elif action == "remove":
        store.remove(f"{name}:{dice.choice(list(store.tags(name)) or ['none'])}")
    elif action == "attach":
        store.attach(store.get(f"{name}:{alias}").with_signature(dice.randbytes(1)), name)
    elif action == "collect":
        collect(store, grace=GRACE, keep_moves=0)
    else:
        read(store, f"{name}:{alias}")


def read(store: Store, reference: str) -> None:
    start = time.monotonic()
    try:
        found = store.get(reference)
        found.verify()
        if b"signed when it was made" not in found.signatures():
            raise AssertionError(f"{reference} was found without its signature")
    except (InvalidArchive, AssertionError):
        if time.monotonic() - start < GRACE.total_seconds() / 2:  # on a busy machine it may have been collected since
            raise


def work(root: Path, seed: int) -> None:
    """Act until killed; anything but an orderly refusal is recorded and ends the run."""
    dice, store = random.Random(seed), Store(root)
    while True:
        action = dice.choice(ACTIONS)
        try:
            act(store, action, dice)
        except (NotFound, TagMoved, AlreadyExists) as error:
            action = f"{action}: {type(error).__name__}"
        except Exception:  # noqa: BLE001 - the process's last words
            (root.parent / f"failed-{os.getpid()}").write_text(traceback.format_exc())
            os._exit(1)
        with (root.parent / "done").open("a") as log:
            log.write(f"{action}\n")


def run(root: Path, seconds: float, seed: int) -> int:
    dice = random.Random(seed)
    workers: set[int] = set()
    killed, end = 0, time.monotonic() + seconds
    while time.monotonic() < end and not list(root.parent.glob("failed-*")):
        while len(workers) < WORKERS:
            number = dice.random()
            pid = os.fork()
            if pid == 0:
                work(root, int(number * 1e9))
            workers.add(pid)
        time.sleep(dice.uniform(0, 0.1))
        victim = dice.choice(sorted(workers))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        workers.discard(victim)
        killed += 1
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return killed


def judge(root: Path) -> list[str]:
    """Return the faults of the store that is left."""
    store = Store(root)
    faults = [path.read_text() for path in root.parent.glob("failed-*")]
    faults += [f"{problem.kind} {problem.subject}: {problem.detail}" for problem in check(store).problems]
    if faults:
        return faults
    collect(store, grace=timedelta(0))
    faults += [f"after gc: {problem.subject}: {problem.detail}" for problem in check(store).problems]
    faults += [f"{path} is left" for path in (*store.tmp.iterdir(), *(root / "leases").iterdir())]
    for name in store.names():
        last: dict[str, str | None] = {}
        for move in store.history(name):
            if move.old != last.get(move.tag):
                faults.append(f"a move of {name}:{move.tag} is missing before {move}")
            last[move.tag] = move.new
        there = {tag: digest for tag, digest in last.items() if digest is not None}
        if there != store.tags(name):
            faults.append(f"the log of {name} says {there}, its tags are {store.tags(name)}")
    return faults


def main() -> int:
    root, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    root.parent.mkdir(parents=True, exist_ok=True)
    killed = run(root, seconds, seed)
    for name in Store(root).names():
        with Store(root).of(name).locked():  # logs what the killed did not
            pass
    faults = judge(root)
    done = Counter((root.parent / "done").read_text().splitlines())
    print(json.dumps({"killed": killed, "done": dict(done.most_common()), "faults": faults}, indent=2))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
