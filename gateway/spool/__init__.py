"""Usage records on their way to the database, with a stop on disk so that neither a crash nor an outage loses any.

    event loop: add ─► Buffer (memory, bounded) ─► Writer (a thread) ─► segment files ─► UsageSink's task ─► database

See docs/usage.md.
"""

from gateway.spool.base import Pace, Store
from gateway.spool.sink import UsageSink

__all__ = ["Pace", "Store", "UsageSink"]
