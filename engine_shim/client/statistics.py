"""What a client has done so far, as one immutable object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Counts since the client was made, and its state now.

    state:             connecting, attached, lost, failed or closed.
    generation:        lives of kvd that this client was attached to.
    attaches:          attaches that succeeded; the first one included.
    last_reattach_s:   how long the last loss of the connection lasted, 0 for none.
    requests:          ended requests by outcome: `ok` or a code.
    requests_open:     requests that wait for their reply.
    replies_unknown:   replies that nobody waited for (late, repeated or forged).
    replies_malformed: frames of kvd that could not be read.
    queries:           questions of kvd about holds, answered.
    events_sent:       slot events sent, repetitions included.
    events_acked:      slot events that kvd acknowledged.
    events_resent:     repetitions among those sent.
    events_refused:    acknowledged ones that changed nothing at kvd.
    events_replaced:   slot events that an announcement to a new kvd took the place of.
    events_unacked:    slot events not acknowledged yet.
    slots_busy:        slots that this process uses now.
    mappings_retired:  memory of earlier lives of kvd that views still keep mapped.
    gate_waits:        ended waits for slots by outcome: free, early, quarantined, timeout, hangup.
    gate_wakes:        times that kvd's wake-up was consumed; one can serve several sleepers.
    gate_spins:        waits that ended before they slept.
    """

    state: str
    generation: int
    attaches: int
    last_reattach_s: float
    requests: Mapping[str, int]
    requests_open: int
    replies_unknown: int
    replies_malformed: int
    queries: int
    events_sent: int
    events_acked: int
    events_resent: int
    events_refused: int
    events_replaced: int
    events_unacked: int
    slots_busy: int
    mappings_retired: int
    gate_waits: Mapping[str, int]
    gate_wakes: int
    gate_spins: int
