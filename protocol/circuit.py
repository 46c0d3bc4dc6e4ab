"""Messages of libp2p's circuit relay v2, as far as a relay without reservations needs them.

Source: github.com/libp2p/specs, relay/circuit-v2.md, "Complete Protobuf". On the wire each is preceded
by its length as an unsigned varint.
"""

from __future__ import annotations

from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

HOP = "/libp2p/circuit/relay/0.2.0/hop"
"""Protocol on which a relay is asked for a circuit."""
STOP = "/libp2p/circuit/relay/0.2.0/stop"
"""Protocol on which a relay offers a circuit to the peer that it leads to."""
RESERVE, CONNECT, HOP_STATUS = 0, 1, 2
STOP_CONNECT = 0
OK, RESOURCE_LIMIT_EXCEEDED, CONNECTION_FAILED, NO_RESERVATION, UNEXPECTED = 100, 201, 203, 204, 401
MAX_MESSAGE_BYTES = 4096
_PACKAGE = "blocktrain.circuit"
_FIELDS = {
    "Peer": (("id", 1, "bytes"), ("addrs", 2, "repeated bytes")),
    "Reservation": (("expire", 1, "uint64"), ("addrs", 2, "repeated bytes"), ("voucher", 3, "bytes")),
    "HopMessage": (
        *(("type", 1, "uint32"), ("peer", 2, "Peer"), ("reservation", 3, "Reservation")),
        ("status", 5, "uint32"),
    ),
    "StopMessage": (("type", 1, "uint32"), ("peer", 2, "Peer"), ("status", 4, "uint32")),
}


def _classes() -> dict[str, Any]:
    """Enumerations are declared as uint32, which is the same on the wire."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="blocktrain/circuit.proto", package=_PACKAGE)
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            label = kinds.LABEL_REPEATED if kind.startswith("repeated ") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            simple = {"bytes": kinds.TYPE_BYTES, "uint32": kinds.TYPE_UINT32, "uint64": kinds.TYPE_UINT64}
            kind = kind.removeprefix("repeated ")
            if kind in simple:
                added.type = simple[kind]
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: cast(Any, message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")))
        for name in _FIELDS
    }


_made = _classes()
HopMessage, StopMessage = _made["HopMessage"], _made["StopMessage"]
