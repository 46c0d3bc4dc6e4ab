"""How far the holders of each block are apart, measured by fetching every holder's anchor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blocktrain.dht.directory import Holder
from blocktrain.dht.session import Session
from blocktrain.dht.state import Download
from blocktrain.protocol.errors import TransferError
from blocktrain.protocol.tensors import decode_state

MAX_STATE_BYTES = 2**34


async def measure_divergence(session: Session) -> list[float]:
    """For each block the greatest absolute difference between any two holders' last anchors.

    Raises:
        NetworkError: a block has no holder, or one does not give its state.
    """
    holders = await session.directory.holders()
    return [await _spread(session, block, holders[block]) for block in sorted(holders)]


async def _spread(session: Session, block: int, holders: Sequence[Holder]) -> float:
    if not holders:
        raise TransferError(f"nobody holds block {block}")
    low: dict[str, torch.Tensor] = {}
    high: dict[str, torch.Tensor] = {}
    for holder in holders:
        state, _ = await Download(session.streams, block, "block", MAX_STATE_BYTES).run([holder])
        tensors, _ = decode_state(state.data, max_bytes=MAX_STATE_BYTES)
        low = {n: torch.minimum(low[n], t) if low else t for n, t in tensors.items()}
        high = {n: torch.maximum(high[n], t) if high else t for n, t in tensors.items()}
    return max(float((high[n] - low[n]).max()) for n in high)
