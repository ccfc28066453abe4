"""The client of one engine member: requests to its kvd, its slots, its share of the memory.

`KvdClient` is a plain, blocking face for one background thread that owns the sockets; any number of
threads may call it. `KvdClient.slots` is how a pipeline acquires slots and reports its steps. When
kvd goes away, requests end at once, sleepers go on waiting for the kvd that comes back, and slot
events are kept; `generation` says whether blocks survived.
"""

from engine_shim.client.client import KvdClient
from engine_shim.client.desk import SlotDesk
from engine_shim.client.errors import KvdRefused, SlotQuarantined
from engine_shim.client.identity import MemberIdentity, new_incarnation
from engine_shim.client.kept import KeptStep
from engine_shim.client.options import ClientOptions
from engine_shim.client.session import LinkState
from engine_shim.client.slots import Tenancy
from engine_shim.client.statistics import ClientStatistics
from engine_shim.client.tickets import Ticket

__all__ = [
    "ClientOptions",
    "ClientStatistics",
    "KeptStep",
    "KvdClient",
    "KvdRefused",
    "LinkState",
    "MemberIdentity",
    "SlotDesk",
    "SlotQuarantined",
    "Tenancy",
    "Ticket",
    "new_incarnation",
]
