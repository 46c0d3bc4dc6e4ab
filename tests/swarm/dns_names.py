"""Join a seed by names that need DNS records. Run it in network and mount namespaces of its own:

    unshare --mount --net PYTHON -m tests.swarm.dns_names HOME

A name server that knows `seed.test` alone answers on this machine's loopback meanwhile; nothing outside
the namespaces sees it. Prints one JSON line: address → whether the seed let us in by it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import cast

import uvloop

from tests.swarm.test_contacts import joined, known

NAME = "seed.test"
_A, _TXT, _AAAA = 1, 16, 28
_TTL_S = 60


class NameServer(asyncio.DatagramProtocol):
    """Answers questions for A, AAAA and TXT records (RFC 1035, RFC 3596) of a few names."""

    def __init__(self, records: dict[tuple[str, int], bytes]) -> None:
        self._records = records
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # uvloop's is none by its class

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        labels, at = [], 12
        while length := data[at]:
            labels.append(data[at + 1 : at + 1 + length].decode())
            at += 1 + length
        (kind,) = struct.unpack_from(">H", data, at + 1)
        found = self._records.get((".".join(labels).lower(), kind))
        answer = b""
        if found is not None:
            answer = struct.pack(">HHHIH", 0xC00C, kind, 1, _TTL_S, len(found)) + found
        header = data[:2] + struct.pack(">HHHHH", 0x8580, 1, 1 if answer else 0, 0, 0)
        assert self._transport is not None
        self._transport.sendto(header + data[12 : at + 5] + answer, sender)


async def _main(home: Path) -> None:
    records = {
        (NAME, _A): socket.inet_aton("127.0.0.1"),
        (NAME, _AAAA): socket.inet_pton(socket.AF_INET6, "::1"),
    }
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: NameServer(records), ("127.0.0.1", 53))
    listen = "/ip4/127.0.0.1/tcp/4001", "/ip6/::1/tcp/4001"
    async with joined(home / "seed", listen=listen) as seed:
        text = f"dnsaddr=/ip4/127.0.0.1/tcp/4001/p2p/{seed.peer_id}".encode()
        records[f"_dnsaddr.{NAME}", _TXT] = bytes([len(text)]) + text
        hosts = [f"/{kind}/{NAME}/tcp/4001" for kind in ("dns4", "dns6", "dns")] + [f"/dnsaddr/{NAME}"]
        found = {}
        for index, host in enumerate(hosts):
            async with joined(home / f"by-{index}", [f"{host}/p2p/{seed.peer_id}"]) as swarm:
                found[host] = seed.peer_id in known(swarm)
        print(json.dumps(found))
    transport.close()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--bind", str(folder / "resolv.conf"), "/etc/resolv.conf"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    uvloop.run(_main(folder))
