"""Who is in a run: signed records in the DHT, written by each node and checked on every read."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from blocktrain.dht.swarm import Swarm, dht_time
from blocktrain.dht.validator import key_digest
from blocktrain.protocol import keys
from blocktrain.protocol.errors import JoinError, RecordError, RunNotFound, SpecError
from blocktrain.protocol.records import PeerRecord, RunRecord, seal, unseal
from blocktrain.protocol.spec import RunSpec

log = logging.getLogger(__name__)
SPEC_TTL_S = 590.0
"""Every node stores the run's specification again well within this time, so that no node is needed for it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One holder of a block, by its own account."""

    peer_id: str
    record: PeerRecord
    expires: float
    """DHT time at which the record is forgotten."""

    @property
    def age_s(self) -> float:
        """Seconds since the holder wrote its record."""
        return max(0.0, dht_time() - self.record.time)


class Directory:
    """Reads and writes the records of one run."""

    def __init__(self, swarm: Swarm, spec: RunSpec, ttl_s: float = 30.0) -> None:
        self.swarm = swarm
        self.spec = spec
        self.ttl_s = ttl_s
        self._expires = 0.0
        swarm.validator.expect_run(spec.fingerprint, spec.model.blocks)

    async def publish(self, record: PeerRecord) -> bool:
        """Write this node's record; it outlives the node by at most `ttl_s`. False: nobody took it.

        Raises:
            NetworkError: the DHT hangs.
        """
        key = keys.holders(self.spec.fingerprint, record.block)
        if self.swarm.place:
            record = dataclasses.replace(record, place=self.swarm.place)
        expires = max(dht_time() + (1.0 if record.leaving else self.ttl_s), self._expires + 0.001)
        self._expires = expires
        value = seal(self.swarm.identity, key_digest(key), expires, record)
        return await self.swarm.store(key, value, expires, subkey=self.swarm.peer_id)

    async def holders(self, *, joining: bool = False) -> dict[int, tuple[Holder, ...]]:
        """Block → its live holders, sorted by peer id; with `joining`, those too that are still on their way.

        Raises:
            NetworkError: the DHT hangs.
        """
        names = {keys.holders(self.spec.fingerprint, b): b for b in range(self.spec.model.blocks)}
        found = await self.swarm.get(list(names))
        live = {block: self._live(name, found[name], block) for name, block in names.items()}
        return {b: tuple(h for h in hs if joining or not h.record.joining) for b, hs in live.items()}

    def _live(self, key: str, value: object, block: int) -> tuple[Holder, ...]:
        holders = []
        for peer_id, item in value.items() if isinstance(value, dict) else ():
            try:
                record = unseal(
                    PeerRecord, item.value, key=key_digest(key), peer_id=peer_id, expires=item.expiration_time
                )
            except RecordError as error:
                log.debug("ignoring a record under %s: %s", key, error)
                continue
            if record.block == block and not record.leaving:
                if self.swarm.relays is not None:
                    self.swarm.relays.suggest(peer_id, record.addresses)
                if self.swarm.contacts is not None and peer_id != self.swarm.peer_id:
                    self.swarm.contacts.suggest(peer_id, record.addresses)
                holders.append(Holder(peer_id, record, item.expiration_time))
        return tuple(sorted(holders, key=lambda h: h.peer_id))

    async def publish_run(self) -> None:
        """Store the specification and announce the run, so that newcomers find both. Raises: NetworkError."""
        await publish_run(self.swarm, self.spec)


async def publish_run(swarm: Swarm, spec: RunSpec) -> None:
    """Store a run's specification and announce the run. Raises: NetworkError."""
    expires = dht_time() + SPEC_TTL_S
    await swarm.store(keys.specification(spec.fingerprint), spec.canonical(), expires)
    value = seal(swarm.identity, key_digest(keys.RUNS), expires, RunRecord(spec.name, spec.fingerprint))
    await swarm.store(keys.RUNS, value, expires, subkey=swarm.peer_id)


async def find_run(swarm: Swarm, wanted: str | None = None) -> RunSpec:
    """The specification of the run to join: the only one, or that of the name or fingerprint `wanted`.

    Raises:
        RunNotFound: it is not here, or not yet.
        JoinError: several fit; the message lists them.
        SpecError: the specification is of a version that this program does not speak.
    """
    runs = await list_runs(swarm)
    if wanted is not None:
        exact = {f: n for f, n in runs.items() if n == wanted or (len(wanted) >= 6 and f.startswith(wanted))}
        if not exact:
            raise RunNotFound(f"no run {wanted!r} in this swarm (it has: {_listed(runs)}); check --run")
        runs = exact
    if not runs:
        raise RunNotFound("this swarm has no run yet; publish one: blocktrain-bootstrap --publish run.toml")
    if len(runs) > 1:
        raise JoinError(f"this swarm has several runs; choose one with --run: {_listed(runs)}")
    (fingerprint,) = runs
    key = keys.specification(fingerprint)
    swarm.validator.expect_run(fingerprint, 0)
    content = (await swarm.get([key]))[key]
    if isinstance(content, dict):  # anyone can store the genuine content again as a dictionary's only entry
        content = next((item.value for item in content.values()), None)
    if not isinstance(content, bytes):
        raise RunNotFound(
            f"the specification of run {_listed(runs)} is not in the DHT; is any of its nodes online?"
        )
    spec = RunSpec.from_canonical(content)
    if spec.fingerprint != fingerprint:
        raise SpecError(
            f"the specification of run {fingerprint[:12]} is not in canonical form; it was tampered with"
        )
    return spec


async def list_runs(swarm: Swarm) -> dict[str, str]:
    """Fingerprint → name of every run that is announced here. Raises: NetworkError."""
    value = (await swarm.get([keys.RUNS]))[keys.RUNS]
    names: dict[str, set[str]] = {}
    for peer_id, item in value.items() if isinstance(value, dict) else ():
        try:
            record = unseal(
                RunRecord,
                item.value,
                key=key_digest(keys.RUNS),
                peer_id=peer_id,
                expires=item.expiration_time,
            )
        except RecordError as error:
            log.debug("ignoring an announcement: %s", error)
            continue
        names.setdefault(record.fingerprint, set()).add(record.name)
    return {
        fingerprint: min(found) if len(found) == 1 else await _true_name(swarm, fingerprint, min(found))
        for fingerprint, found in names.items()
    }


async def _true_name(swarm: Swarm, fingerprint: str, otherwise: str) -> str:
    """The name in a run's specification, which can't be forged, for when its announcers disagree."""
    key = keys.specification(fingerprint)
    content = (await swarm.get([key]))[key]
    try:
        return RunSpec.from_canonical(content).name if isinstance(content, bytes) else otherwise
    except SpecError:
        return otherwise


def _listed(runs: dict[str, str]) -> str:
    return ", ".join(f"{name} ({fingerprint[:12]})" for fingerprint, name in sorted(runs.items())) or "none"
