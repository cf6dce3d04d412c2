"""The records between a front process and the main process.

Sender and receiver are the same program on the same machine, so the content is not checked.
"""

from __future__ import annotations

import struct
from enum import IntEnum


class Kind(IntEnum):
    """The kind of a record. Comments give the sender and the body."""

    HELLO = 0  # engine: settings, as JSON
    STATE = 1  # engine: the models, as JSON; answered by SEEN
    SEEN = 2  # front
    STARTED = 3  # front: its ports are open
    FAILED = 4  # front: they could not be opened; the error
    STOP = 5  # engine: seconds to drain
    LAYOUT = 6  # both: names, datatypes and shapes of tensors, as JSON; their layout gets the next number
    REQUEST = 7  # front: number, model, deadline, priority, client, tensors
    CANCEL = 8  # front: number
    OUTPUTS = 9  # engine: number, tensors
    ERROR = 10  # engine: number, code, text
    FREE = 11  # both: a block of the other's arena is no longer used
    COUNT = 12  # engine: answered by COUNTS
    COUNTS = 13  # front: its metrics, as JSON
    RENDER = 14  # front: number; answered by all metrics, as Prometheus' text
    STATISTICS = 15  # front: number, model; answered by the model's statistics, as JSON
    REPLY = 16  # engine: number, and the content requested by RENDER or STATISTICS
    PING = 17  # front: answered by PONG
    PONG = 18  # engine
    STEP = 19  # front: as REQUEST, for a model with states, with the step of its sequence before the tensors
    DROP = 20  # front: model, and the step of the sequence to drop
    CLOSE = 21  # engine: close the ports; answered by CLOSED
    CLOSED = 22  # front
    BATCH = 23  # engine: the batch of the outputs that follow: times, requests, samples, reason


# Times are in seconds of ``time.perf_counter``, which is one clock for all processes of the machine.
BATCH = struct.Struct("<4dIIB")
SECONDS = struct.Struct("<d")
MODEL = struct.Struct("<QI")
REQUEST = struct.Struct("<QIdIQ")
STEP = struct.Struct("<16s??")
DROP = struct.Struct("<I16s??")
# The number of the layout, and where the data lies: an offset in the sender's arena, or INLINE.
TENSORS = struct.Struct("<IQ")
