"""Limits that several gateways share through Redis. See docs/adr/0008-shared-limits.md.

store      what the gateway talks to           link       the connection, one server or a cluster
counter    windows and budgets                 courier    batches, and whether Redis is there
place      requests at the same time           notices    messages between gateways
spans      what a counter counts over          terms      what the parts say to each other
"""

from gateway.limits_redis.store import RedisCounters

__all__ = ["RedisCounters"]
