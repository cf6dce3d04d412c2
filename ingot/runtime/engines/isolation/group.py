"""An engine in several processes: ``python -m ingot.runtime.engines.isolation.group PARENT SHARDS SPEC``.

This process runs torchrun, which starts SHARDS processes of this module and ends them all when one ends. The first is
the engine process that the server knows. The control socket is the standard input of all of them, as torchrun passes on
no other file descriptor; the others arrive over it. SPEC is the file descriptor of a file in memory, with
the :class:`ProcessSpec`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path

from ingot import foreign
from ingot.runtime.engines.isolation import child, confinement
from ingot.runtime.engines.isolation.spec import ProcessSpec

HANDLES = 3
"""File descriptors that arrive over the control socket: the connection, and the arenas to write and to read."""
# Bytes of the message that they arrive with.
_GREETING = 1


def main() -> None:
    """Run torchrun, or one of its processes."""
    if "LOCAL_RANK" in os.environ:  # the server passes on no variable of this name
        _take_part(*map(int, sys.argv[1:]))
    else:
        _launch(*map(int, sys.argv[1:]))


def _launch(parent: int, shards: int, spec: int) -> None:
    confinement.before_starting_group(parent)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Torchrun's usual store is open to the network; a file in memory is not, and nothing has to be removed.
    store = os.memfd_create("ingot-group")
    threading.Thread(target=_end_with_server, daemon=True).start()
    place = f"/proc/{os.getpid()}/fd/{store}"
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={place}",
        "--rdzv-conf=store_type=file",
        "--local-addr=127.0.0.1",
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, with a warning; engines set their own number
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONSAFEPATH": "1"}
    program = ["-m", "ingot.runtime.engines.isolation.group", str(os.getpid()), str(store), str(spec)]
    try:
        run(parse_args([f"--nproc-per-node={shards}", "--log-dir=/dev/null", *rendezvous, *program]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = next(
            ((rank, item) for rank, item in error.failures.items() if item.exitcode < 0), error.get_first_failure()
        )
        ending = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
        os.write(0, f"ended, since process {rank} of {shards} ended {ending}".encode())
        os._exit(1)


def _end_with_server() -> None:
    """Let torchrun end all processes when the server has closed the control socket."""
    poll = select.poll()
    poll.register(0, 0)  # POLLHUP, which is always reported
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)


def _take_part(agent: int, store: int, description: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends this process
    spec = ProcessSpec.loads(Path(f"/proc/{agent}/fd/{description}").read_bytes())
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    handle = os.open(f"/proc/{agent}/fd/{store}", os.O_RDWR)
    join = partial(_join, f"/proc/self/fd/{handle}", rank, count, spec.engine.device)
    if rank == 0:
        control = socket.socket(fileno=0)
        connection, written, read = socket.recv_fds(control, _GREETING, HANDLES)[1]
        child.serve([child.link_of(connection, written, read)], control, agent, join)
    else:
        _follow(agent, spec, join)
    os._exit(0)  # without waiting for PyTorch's threads


def _join(store: str, rank: int, count: int, device: str) -> None:
    from ingot.runtime.engines.sharding import sharded

    sharded.join(store, rank, count, device)


def _follow(agent: int, spec: ProcessSpec, join: child.Join) -> None:
    """Run the part of the engine in another process than the first."""
    child.confine(spec, agent, join)
    from ingot.runtime.engines.opening import open_engine
    from ingot.runtime.engines.sharding.sharded import ShardedEngine

    engine = foreign.attempt(lambda: open_engine(spec.engine))
    confinement.after_loading()
    if isinstance(engine, ShardedEngine):  # otherwise the first process reports why not
        engine.follow()


if __name__ == "__main__":
    main()
