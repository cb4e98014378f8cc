"""`python -m tests.store.contender URL NAME COUNT`: opens the store on a line from stdin and creates COUNT tenants."""

from __future__ import annotations

import asyncio
import sys

from gateway.records import Actor, TenantRecord
from gateway.store import Store


async def contend(url: str, name: str, count: int) -> None:
    store = await Store.open(url)
    try:
        for number in range(count):
            await store.create_tenant(TenantRecord(f"{name}-{number}"), Actor(name))
    finally:
        await store.close()


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    asyncio.run(contend(sys.argv[1], sys.argv[2], int(sys.argv[3])))
