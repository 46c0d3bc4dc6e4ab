"""Two hosts behind two NATs and one with an open address, as network namespaces of this machine.

    seed 45.10.0.10 ──┬── wan (a bridge, 45.10.0.0/16)
                      ├── nat-a 45.10.1.1 ── host-a 192.168.1.2
                      └── nat-b 45.10.2.1 ── host-b 192.168.1.2   (homes use the same addresses, too)

The outside addresses look public, because libp2p relays through no others; they exist only in here.
The routers masquerade and drop whatever comes in that nobody inside has asked for.
Needs root, `ip` and `nft`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SEED_IP = "45.10.0.10"
HOST_IP = "192.168.1.2"
_ROUTER_IP = "192.168.1.1"
_NATS = {"a": "45.10.1.1", "b": "45.10.2.1"}
_COUNT = itertools.count()
_RULES = """
table inet router {
    chain outgoing { type nat hook postrouting priority srcnat; oifname "wan" masquerade; }
    chain through {
        type filter hook forward priority filter; policy drop;
        iifname "lan" accept
        ct state established,related accept
    }
    chain local {
        type filter hook input priority filter; policy drop;
        iifname { "lo", "lan" } accept
        ct state established,related accept
    }
}
"""


@dataclass(frozen=True, slots=True)
class Topology:
    """Names of the namespaces. Run a command in one with `inside(name, …)`."""

    seed: str
    host_a: str
    host_b: str
    nat_a: str
    nat_b: str

    def inside(self, namespace: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]


def available() -> bool:
    """Whether this machine lets us make namespaces: root, with the tools."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "nft"))


@contextlib.contextmanager
def nat_topology() -> Iterator[Topology]:
    """Make the namespaces, give their names, remove them at the end or on failure.

    End the processes inside first: a namespace lives as long as a process in it.

    Raises:
        subprocess.CalledProcessError: a step was refused; its `stderr` says why.
    """
    prefix = f"bt{os.getpid()}x{next(_COUNT)}"
    wan, seed = f"{prefix}-wan", f"{prefix}-seed"
    names = {kind: {nat: f"{prefix}-{kind}-{nat}" for nat in _NATS} for kind in ("nat", "host")}
    with contextlib.ExitStack() as cleanup:
        _add_namespace(cleanup, wan)
        _run(*_in(wan), *["ip", "link", "add", "wan", "type", "bridge"])
        _run(*_in(wan), *["ip", "link", "set", "wan", "up"])
        _add_namespace(cleanup, seed)
        _plug_into_wan(wan, seed, SEED_IP)
        for letter, address in _NATS.items():
            nat, host = names["nat"][letter], names["host"][letter]
            _add_namespace(cleanup, nat)
            _add_namespace(cleanup, host)
            _plug_into_wan(wan, nat, address)
            _make_home(nat, host)
        yield Topology(seed, names["host"]["a"], names["host"]["b"], names["nat"]["a"], names["nat"]["b"])


def _add_namespace(cleanup: contextlib.ExitStack, name: str) -> None:
    _run("ip", "netns", "add", name)
    cleanup.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, capture_output=True)
    _run(*_in(name), *["ip", "link", "set", "lo", "up"])


def _plug_into_wan(wan: str, namespace: str, address: str) -> None:
    """A cable from the namespace, where it is called `wan`, to the bridge."""
    port = "p" + address.replace(".", "-")
    _run("ip", "link", "add", "wan", "netns", namespace, "type", "veth", "peer", "name", port, "netns", wan)
    _run(*_in(wan), *f"ip link set {port} master wan up".split())
    _run(*_in(namespace), *f"ip address add {address}/16 dev wan".split())
    _run(*_in(namespace), *["ip", "link", "set", "wan", "up"])


def _make_home(nat: str, host: str) -> None:
    """A router with a host behind it."""
    _run("ip", "link", "add", "lan", "netns", nat, "type", "veth", "peer", "name", "lan", "netns", host)
    for namespace, address in ((nat, _ROUTER_IP), (host, HOST_IP)):
        _run(*_in(namespace), *f"ip address add {address}/24 dev lan".split())
        _run(*_in(namespace), *["ip", "link", "set", "lan", "up"])
    _run(*_in(host), *f"ip route add default via {_ROUTER_IP}".split())
    _run(*_in(nat), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    _run(*_in(nat), "nft", "-f", "-", text=_RULES)


def _in(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _run(*command: str, text: str | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, input=text)
