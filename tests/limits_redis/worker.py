"""A process that hammers one limit: `python -m tests.limits_redis.worker URL KIND SECONDS`, then one JSON line.

`KIND` is requests, tokens, parallel, or holds: takes what slots it gets, says how many, and keeps them until it is told
to go by a line on its input.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from tests.limits_redis.gateways import Gateway, finish, gateways, parallel, requests, tokens

REQUESTS = requests(60)
TOKENS = tokens(10_000)
PARALLEL = parallel(3)
SMALLEST = 50  # tokens that a request sets aside


async def hammer(node: Gateway, kind: str, seconds: float) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    spans: list[tuple[float, float]] = []  # what surely ran
    spent = 0

    async def one() -> None:
        nonlocal spent
        while time.monotonic() < deadline:
            limits = {"requests": REQUESTS, "tokens": TOKENS, "parallel": PARALLEL}[kind]
            cost = random.randint(SMALLEST, 300) if kind == "tokens" else 0
            lease = await node.admit(limits, cost)
            if lease is not None:
                begun = time.monotonic()
                await asyncio.sleep(random.uniform(0, 0.01))
                used = random.randint(0, cost)
                spent += used
                spans.append((begun, time.monotonic()))
                finish(lease, used)
            await asyncio.sleep(0.002)

    await asyncio.gather(*(one() for _ in range(8)))
    return {"admitted": len(spans), "spent": spent, "spans": spans}


async def hold(node: Gateway) -> None:
    leases = [await node.admit(PARALLEL) for _ in range(3)]
    print(json.dumps({"held": sum(lease is not None for lease in leases)}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for lease in leases:
        if lease is not None:
            finish(lease)


async def main(url: str, kind: str, seconds: str) -> None:
    async with gateways(url, 1) as (node,):
        if kind == "holds":
            await hold(node)
        else:
            result = await hammer(node, kind, float(seconds))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
