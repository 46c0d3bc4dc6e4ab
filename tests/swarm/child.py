"""A member in a process of its own, for tests that kill or freeze it or shift its clock.

    python -m tests.swarm.child ROLE HOME CLOCK_OFFSET_S [INITIAL_PEER …]

It prints one JSON line once it has joined, and ends when its standard input does. Roles:
`idle`: nothing more. `donor`: gives away a large state of block 0. `freeze`: takes part in a round of
block 0 that INITIAL_PEER leads, `freeze-leading` in one that it leads itself, and stops itself (SIGSTOP)
when it knows the group, before it sends anything.
"""

from __future__ import annotations

import sys
import time

if float(sys.argv[3]):
    _real_time = time.time
    time.time = lambda: _real_time() + float(sys.argv[3])  # before hivemind takes hold of it

import asyncio
import json
import os
import signal
from pathlib import Path

import uvloop

from blocktrain.protocol.addresses import peer_id_of
from tests.swarm.giving import LARGE, give
from tests.swarm.members import daemons, hold_block, members


async def _main(role: str, home: Path, initial: list[str]) -> None:
    async with members(1, home, peers=initial) as (member,):
        known = {"peer_id": member.peer_id, "addresses": await member.swarm.addresses()}
        if role in ("idle", "donor"):
            if role == "donor":
                await give(member, LARGE)
            print(json.dumps(known | {"daemon": daemons()[0].pid}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
            return
        (holder,) = await hold_block([member], size=1000)
        leader = member.peer_id if role == "freeze-leading" else peer_id_of(initial[0])
        holder.averager.rendezvous._leader = lambda: leader  # type: ignore[method-assign]
        print(json.dumps(known), flush=True)
        await holder.average(within_s=30.0, on_snapshot=_freeze)


async def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], Path(sys.argv[2]), sys.argv[4:]))
