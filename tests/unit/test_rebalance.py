"""Moving between blocks: coverage comes back, nothing flaps. With a simulation of 200 nodes under churn."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from blocktrain.node.rebalance import MIN_RATIO, Share, elect_move

BLOCKS = 8
DEADLINE_S = 60
TTL_S = 30
TERM_S = 60
BALANCE_TERM_S = 600


def shares(*speeds: list[float]) -> dict[int, list[Share]]:
    """Blocks with holders of the given speeds; holder j of block i is called i-j."""
    return {i: [Share(f"{i}-{j}", s) for j, s in enumerate(block)] for i, block in enumerate(speeds)}


def test_an_orphaned_block_gets_one_node_of_a_block_that_can_spare_it() -> None:
    """Never the only holder of another block."""
    for term in range(50):
        mover, block = elect_move(shares([5], [], [1, 1, 1]), term, balance=False) or ("", -1)
        assert block == 1
        assert mover.startswith("2-")


def test_nobody_moves_when_nobody_can_be_spared() -> None:
    """Two blocks with a holder each and one without: two nodes can't hold three blocks."""
    assert elect_move(shares([5], [], [1]), 0, balance=True) is None


def test_everybody_elects_the_same_node_and_terms_differ() -> None:
    """The order in which the directory lists holders does not matter."""
    there = shares([], [1] * 20)
    back = {block: list(reversed(holders)) for block, holders in reversed(there.items())}
    movers = {elect_move(there, term, balance=False) for term in range(30)}
    assert len(movers) > 5
    assert all(elect_move(there, t, balance=False) == elect_move(back, t, balance=False) for t in range(30))


def test_small_differences_move_nobody() -> None:
    """Hysteresis: below the ratio nothing happens, above it one node does, and then it is quiet again."""
    assert elect_move(shares([10, 10], [10]), 0, balance=True) is None
    move = elect_move(shares([10, 10, 10, 10], [10]), 0, balance=True)
    assert move is not None
    assert move[1] == 1
    assert elect_move(shares([10, 10, 10], [10, 10]), 1, balance=True) is None


def test_a_mover_never_leaves_the_giver_worse_off() -> None:
    """One fast node alone makes a block rich, but its leaving would only swap the roles."""
    assert elect_move(shares([100, 1], [10]), 0, balance=True) in (("0-1", 1), None)
    assert MIN_RATIO * 10 < 101


@dataclass
class Swarm:
    """A simulated swarm: records appear at once and vanish with their expiry, as in the DHT."""

    rng: random.Random
    now: float = 0.0
    held: dict[str, int] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    ghosts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Nodes that were killed: their record is still listed until it expires."""
    moves: Counter[str] = field(default_factory=Counter)
    node_hours: float = 0.0
    uncovered_since: dict[int, float] = field(default_factory=dict)
    longest_gap: float = 0.0

    def listed(self) -> dict[int, list[Share]]:
        """What the directory shows."""
        found: dict[int, list[Share]] = defaultdict(list, {b: [] for b in range(BLOCKS)})
        for peer, block in self.held.items():
            found[block].append(Share(peer, self.speed[peer]))
        for peer, (block, until) in self.ghosts.items():
            if until > self.now:
                found[block].append(Share(peer, self.speed[peer]))
        return dict(found)

    def join(self, name: str) -> None:
        """A newcomer takes the block with the fewest holders, then the slowest."""
        listed = self.listed()
        self.speed[name] = self.rng.lognormvariate(3, 1)
        self.held[name] = min(
            listed, key=lambda b: (len(listed[b]), sum(s.tokens_per_s for s in listed[b]), self.rng.random())
        )

    def leave(self, name: str) -> None:
        """Half of them are killed, and stay listed for a while."""
        block = self.held.pop(name)
        if self.rng.random() < 0.5:
            self.ghosts[name] = block, self.now + TTL_S

    def term(self, *, balance: bool) -> None:
        """Every node computes the election; only the elected one acts, if it is alive."""
        move = elect_move(self.listed(), int(self.now) // TERM_S, balance=balance)
        if move is not None and move[0] in self.held:
            self.held[move[0]] = move[1]
            self.moves[move[0]] += 1

    def watch(self, step_s: float) -> None:
        """Measure coverage by live nodes."""
        self.node_hours += len(self.held) * step_s / 3600
        covered = set(self.held.values())
        for block in range(BLOCKS):
            if block in covered:
                self.uncovered_since.pop(block, None)
            else:
                since = self.uncovered_since.setdefault(block, self.now)
                self.longest_gap = max(self.longest_gap, self.now - since)


@pytest.mark.slow
@pytest.mark.parametrize("lifetime_s", [600.0, 3600.0])
@pytest.mark.parametrize("size", [12, 200])
def test_churn_is_survived_without_flapping(size: int, lifetime_s: float) -> None:
    """Six simulated hours of joins, leaves, kills and speeds over two orders of magnitude.

    No block is without a live holder for longer than its ghosts' expiry plus two deadlines, and a node
    moves at most once an hour on average.
    """
    swarm = Swarm(random.Random(size))
    names = itertools.count()
    departures: list[tuple[float, str]] = []

    def arrive() -> None:
        name = f"n{next(names)}"
        swarm.join(name)
        heapq.heappush(departures, (swarm.now + swarm.rng.expovariate(1 / lifetime_s), name))

    for _ in range(size):
        arrive()
    step_s = 10.0
    while swarm.now < 6 * 3600:
        swarm.now += step_s
        while departures and departures[0][0] < swarm.now:
            swarm.leave(heapq.heappop(departures)[1])
            arrive()
        if swarm.now % TERM_S == 0:
            swarm.term(balance=swarm.now % BALANCE_TERM_S == 0)
        swarm.watch(step_s)
    assert swarm.longest_gap <= TTL_S + 2 * DEADLINE_S
    assert sum(swarm.moves.values()) / swarm.node_hours <= 1.0


def test_a_holder_whose_speed_nobody_knows_yet_makes_no_block_poor() -> None:
    """It has just come; to judge its block by it would send somebody there for nothing."""
    assert elect_move(shares([10, 10, 10], [0]), 0, balance=True) is None
    assert elect_move(shares([10, 10, 10], [1]), 0, balance=True) is not None
    assert elect_move(shares([10, 10, 10], [0], []), 0, balance=True) is not None
