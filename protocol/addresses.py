"""Multiaddrs at the edges: what users type, what records hold. Inside, addresses are plain strings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from multiaddr import Multiaddr

from blocktrain.protocol.errors import AddressError

MAX_ADDRESS_CHARS = 512
HOSTS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr"})
TRANSPORTS = frozenset({"tcp", "udp"})
MAX_FILE_BYTES = 1_048_576
_IPFS = re.compile(r"(?<!/dns)(?<!/dns4)(?<!/dns6)(?<!/dnsaddr)/ipfs/")  # but not a host of that name


def parse_address(text: str, *, listening: bool = False) -> str:
    """Check one multiaddr and give its canonical text, with `/ipfs/` turned into `/p2p/`.

    A peer's address must end in `/p2p/PEER_ID` and name a port; an address to listen on must have no
    peer id and may have port 0.

    Raises:
        AddressError: quotes the address and says what is wrong with it.
    """
    address, steps = _parse(text)
    names = [name for name, _ in steps]
    shown = text[:120]
    if names[0] not in HOSTS:
        raise AddressError(
            f"{shown!r}: /{names[0]} can't be dialled; use /ip4, /ip6, /dns4, /dns6 or /dnsaddr"
        )
    if names[0] != "dnsaddr" and not TRANSPORTS & set(names):
        raise AddressError(f"{shown!r}: has no port; expected /{names[0]}/…/tcp/PORT or …/udp/PORT/quic-v1")
    if listening:
        if "p2p" in names:
            raise AddressError(f"{shown!r}: an address to listen on has no /p2p/PEER_ID")
        return address
    if names[-1] != "p2p":
        raise AddressError(
            f"{shown!r}: must end in /p2p/PEER_ID; copy the whole line that the other node printed"
        )
    if any(name in TRANSPORTS and value == "0" for name, value in steps):
        raise AddressError(f"{shown!r}: port 0 can't be dialled; use the port that the other node printed")
    return address


def parse_addresses(values: Iterable[str]) -> tuple[str, ...]:
    """Addresses of peers as users give them: repeated, or separated by commas, spaces or lines, or `@FILE`.

    Lines of a file that begin with # are comments. Duplicates are dropped, the order is kept.

    Raises:
        AddressError: for the first that can't be used, for an unreadable file, and for an empty value.
    """
    found: dict[str, None] = {}
    for value in values:
        texts = _read_file(value[1:]) if value.startswith("@") else re.split(r"[,\s]+", value.strip())
        if not any(texts):
            raise AddressError(f"{value[:120]!r}: holds no address")
        found.update((parse_address(text), None) for text in texts if text)
    return tuple(found)


def peer_id_of(address: str) -> str:
    """The peer that an address leads to: what follows its last `/p2p/`."""
    return address.rpartition("/p2p/")[2]


def _parse(text: str) -> tuple[str, list[tuple[str, str | None]]]:
    """An address's canonical text, and the names and values that it consists of."""
    if not text.startswith("/"):
        raise AddressError(
            f"{text[:120]!r}: not a multiaddr; expected e.g. /ip4/203.0.113.7/tcp/4001/p2p/PEER_ID"
        )
    if len(text) > MAX_ADDRESS_CHARS:
        raise AddressError(f"{text[:60]!r}…: longer than {MAX_ADDRESS_CHARS} characters")
    if not (text.isascii() and text.isprintable()):
        raise AddressError(f"{text[:120]!r}: holds a character that multiaddrs don't have")
    try:
        address = Multiaddr(_IPFS.sub("/p2p/", text))
        steps = [(protocol.name, value) for protocol, value in address.items()]
        canonical = str(address)
    except Exception as error:  # noqa: BLE001 - py-multiaddr lets several kinds through
        raise AddressError(f"{text[:120]!r}: {_reason(str(error)) or type(error).__name__}") from None
    if not steps:
        raise AddressError(f"{text[:120]!r}: empty multiaddr")
    return canonical, steps


def _reason(message: str) -> str:
    """The telling part of py-multiaddr's `Invalid MultiAddr 'ADDRESS': REASON (string: ADDRESS)`."""
    reason = message.rpartition("': ")[2].partition(" (string")[0]
    if reason.startswith("Invalid CID"):
        return "the peer id is cut short or mistyped; copy the whole line that the other node printed"
    return reason[:200]


def _read_file(name: str) -> list[str]:
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        lines = data.decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that can't be one
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise AddressError(f"@{name[:120]!r}: can't be read: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise AddressError(f"@{name[:120]!r}: larger than {MAX_FILE_BYTES} bytes; is it a list of addresses?")
    kept = " ".join(line for line in lines if not line.lstrip().startswith("#"))
    return re.split(r"[,\s]+", kept.strip())
