"""Which records this node stores for others and believes when it reads them.

Two kinds exist. A *signed* record stands under the peer id of its owner as subkey. A *content* record
has no subkey and stands under a key made from its own hash. Everything else is refused.
"""

from __future__ import annotations

import logging
from collections import Counter

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from blocktrain.protocol import keys
from blocktrain.protocol.errors import BlocktrainError, RecordError
from blocktrain.protocol.identity import SIGNATURE_BYTES
from blocktrain.protocol.records import PeerRecord, RunRecord, check_expiry, check_signature, parse_record
from blocktrain.protocol.spec import MAX_SPEC_BYTES

log = logging.getLogger(__name__)
_NO_SUBKEY = MSGPackSerializer.dumps(None)
_MAX_SUBKEY_BYTES = 64
"""A peer id has 52; hivemind's own envelope adds two."""


def key_digest(key: str) -> bytes:
    """A key as the DHT knows it: the digest that it routes by."""
    return bytes(DHTID.generate(source=key).to_bytes())


class RecordValidator(RecordValidatorBase):
    """Refuses unsigned, oversized, expired, far-future, misplaced and malformed records.

    `kinds` maps digested keys to the class of record that must stand there, None for content. Other keys,
    those of runs that this node is not part of, are checked for all but the fields. `rejected` counts by
    the check that failed: `expiry`, `size`, `owner` or `fields`.
    """

    def __init__(self) -> None:
        self.kinds: dict[bytes, type[PeerRecord | RunRecord] | None] = {key_digest(keys.RUNS): RunRecord}
        self.rejected: Counter[str] = Counter()

    def expect_run(self, fingerprint: str, blocks: int) -> None:
        """Check the fields of this run's records too, and keep signed ones off its specification's key."""
        self.kinds |= {key_digest(keys.holders(fingerprint, block)): PeerRecord for block in range(blocks)}
        self.kinds[key_digest(keys.specification(fingerprint))] = None

    def validate(self, record: DHTRecord) -> bool:
        """Whether hivemind may store the record or hand it to us."""
        for name, check in (
            ("expiry", _check_expiry),
            ("size", _check_size),
            ("owner", self._check_owner),
            ("fields", self._check_fields),
        ):
            try:
                check(record)
            except BlocktrainError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - hostile bytes in hivemind's own envelope
                reason = f"undecodable ({type(error).__name__})"
            else:
                continue
            self.rejected[name] += 1
            log.debug("refused a DHT record (%s): %s", name, reason)
            return False
        return True

    def _check_owner(self, record: DHTRecord) -> None:
        value = MSGPackSerializer.loads(record.value)
        if record.subkey == _NO_SUBKEY:
            if not isinstance(value, bytes) or key_digest(keys.specification_of(value)) != record.key:
                raise RecordError("neither signed nor under the key of its own content")
            return
        if self.kinds.get(record.key, RunRecord) is None:
            raise RecordError("a signed record under the key of a specification")
        peer_id = MSGPackSerializer.loads(record.subkey)
        check_signature(value, key=record.key, peer_id=peer_id, expires=record.expiration_time)

    def _check_fields(self, record: DHTRecord) -> None:
        kind = self.kinds.get(record.key)
        if kind is not None:
            parse_record(kind, MSGPackSerializer.loads(record.value)[SIGNATURE_BYTES:])

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """There is one validator in a node."""
        return isinstance(other, RecordValidator)


def _check_expiry(record: DHTRecord) -> None:
    check_expiry(record.expiration_time, get_dht_time())


def _check_size(record: DHTRecord) -> None:
    if len(record.value) > MAX_SPEC_BYTES + 16 or len(record.subkey) > _MAX_SUBKEY_BYTES:
        raise RecordError("value or subkey too large")
