"""Getting a block's current state from its holders, from several at once where they offer the same bytes.

Replaces hivemind's `load_state_from_peers`, which takes a cut-off download for a whole one. A chunk is
used only when its digest fits; a donor that fails is named and replaced, and what was verified is kept
as long as another donor offers the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Sequence

from blocktrain.dht.chunks import Board, Progress, fetch_chunks
from blocktrain.dht.directory import Holder
from blocktrain.dht.donor import STATE_IDLE_S, purpose
from blocktrain.dht.manifest import State, Subject, check_manifest, same_bytes
from blocktrain.dht.streams import Stream, Streams
from blocktrain.protocol.errors import PeerError, TransferError
from blocktrain.protocol.messages import Load, LoadRequest, Manifest, StateRequest

log = logging.getLogger(__name__)
DONORS_AT_ONCE = 3
MAX_ASKED = 12
"""Donors that are asked how busy they are, where there are more than are needed at once."""
LOAD_WAIT_S = 1.0
"""Whoever has not said by then how busy it is comes last."""
BUSY_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses before busy donors are asked again; the last one repeats."""
BUSY_PATIENCE_S = 600.0


class _BusyError(PeerError):
    """The donor has no room for another download now."""


class _OtherBytesError(PeerError):
    """The donor offers another state than the one that is being fetched."""


class Download:
    """A joiner's side: fetches one state from whichever donors work."""

    def __init__(self, streams: Streams, block: int, what: str, max_bytes: int) -> None:
        self._streams, self._max_bytes = streams, max_bytes
        self._subject = Subject(streams.fingerprint, block, what)
        # Anchors are the same for all holders of a block; every node's table is its own.
        self._width = 1 if what == "table" else DONORS_AT_ONCE
        self._progress: Progress = lambda done, total: None
        self._board: Board | None = None
        self._fetching = 0
        self._failures: dict[str, str] = {}
        self.signers: list[str] = []
        """Donors that signed a manifest of the state that was fetched last."""

    async def run(
        self, donors: Sequence[Holder], progress: Progress = lambda done, total: None
    ) -> tuple[State, str]:
        """The state, and the donor that completed it.

        Donors of the same round are used together, the least busy ones first; rounds, and the donors of a
        table, in the order given.

        Raises:
            TransferError: no donor could complete it; the message says what each one did.
        """
        self._progress = progress
        for _, same_round in itertools.groupby(donors, key=lambda donor: donor.record.round):
            finisher = await self._use(list(same_round))
            if finisher:
                assert self._board is not None
                manifest = self._board.manifest
                return State(self._board.data, manifest.round, manifest.anchor), finisher
        block, what = self._subject.block, self._subject.what
        why = "; ".join(self._failures.values()) or "there is none"
        raise TransferError(f"no holder of block {block} gave its {what} state: {why}")

    async def _use(self, donors: list[Holder]) -> str:
        """Fetch from these donors until one has completed the state or all have failed (empty)."""
        if len(donors) > self._width > 1:
            donors = await self._least_busy_first(donors)
        clock, pauses = asyncio.get_running_loop().time, iter(BUSY_PAUSES_S)
        started, switch = clock(), False
        while True:
            finisher, busy, other = await self._try_each(donors, switch)
            if finisher:
                return finisher
            # Nobody is left who has the bytes of the current board: begin anew with what the others have.
            donors, switch = (other, True) if other else (busy, False)
            if not donors or (not other and clock() - started > BUSY_PATIENCE_S):
                return ""
            if not other:
                pause = next(pauses, BUSY_PAUSES_S[-1])
                log.info("%s; asking again in %.1f s", self._failures[busy[0].peer_id], pause)
                await asyncio.sleep(pause)
            elif busy:
                donors = [*other, *busy]

    async def _try_each(
        self, donors: Sequence[Holder], switch: bool
    ) -> tuple[str, list[Holder], list[Holder]]:
        """Use every donor once, so many at once: who completed the state, who is busy, who has another."""
        waiting = deque(donors)
        finishers: list[str] = []
        failed: defaultdict[type[PeerError], list[Holder]] = defaultdict(list)

        async def work() -> None:
            while waiting and not finishers:
                donor = waiting.popleft()
                try:
                    await self._fetch(donor, switch)
                except PeerError as error:
                    self._note(donor, error)
                    failed[type(error)].append(donor)
                else:
                    finishers.append(donor.peer_id)
                    for worker in workers:
                        worker.cancel()

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(min(self._width, len(waiting)))]
        return "".join(finishers[:1]), failed[_BusyError], failed[_OtherBytesError]

    def _note(self, donor: Holder, error: PeerError) -> None:
        level = logging.DEBUG if isinstance(error, _BusyError | _OtherBytesError) else logging.WARNING
        log.log(level, "state of block %d: %s", self._subject.block, error)
        self._failures[donor.peer_id] = str(error)

    async def _fetch(self, donor: Holder, switch: bool) -> None:
        """Take part in fetching with one donor until the state is complete. Raises: PeerError."""
        async with self._open(donor) as stream:
            await stream.send(StateRequest(self._subject.what))
            load, _ = await stream.expect(Load)
            if load.full:
                raise _BusyError(donor.peer_id, f"busy with {load.uploads} other downloads")
            manifest, _ = await stream.expect(Manifest, timeout_s=STATE_IDLE_S)
            check_manifest(manifest, self._subject, donor.peer_id, self._max_bytes)
            board = self._adopt(manifest, donor.peer_id, switch)
            self._fetching += 1
            try:
                await fetch_chunks(stream, board)
            finally:
                self._fetching -= 1

    def _adopt(self, manifest: Manifest, donor: str, switch: bool) -> Board:
        """The board for these bytes. Raises: _OtherBytesError: another one is not given up for them."""
        board = self._board
        if board is None or (switch and not self._fetching and not same_bytes(manifest, board.manifest)):
            board = self._board = Board(manifest, self._progress)
            self.signers.clear()
        if not same_bytes(manifest, board.manifest):
            raise _OtherBytesError(donor, f"offers another state of round {manifest.round}")
        self.signers.append(donor)
        return board

    async def _least_busy_first(self, donors: Sequence[Holder]) -> list[Holder]:
        asked = {asyncio.create_task(self._ask_load(donor)): donor for donor in donors[:MAX_ASKED]}
        answered, silent = await asyncio.wait(asked, timeout=LOAD_WAIT_S)
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        uploads = {asked[task].peer_id: task.result() for task in answered}
        return sorted(donors, key=lambda donor: uploads.get(donor.peer_id, float("inf")))

    async def _ask_load(self, donor: Holder) -> float:
        try:
            async with self._open(donor) as stream:
                await stream.send(LoadRequest())
                load, _ = await stream.expect(Load)
        except PeerError:
            return float("inf")  # why not is told when it is its turn
        return float(load.uploads)

    def _open(self, donor: Holder) -> contextlib.AbstractAsyncContextManager[Stream]:
        return self._streams.open(donor.peer_id, purpose(self._subject.block), donor.record.addresses)
