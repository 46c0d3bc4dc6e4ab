"""`blocktrain-peers` tells what is wrong first, shows every holder, and labels what it shows."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from blocktrain.dht.cli_peers import Holders, as_document, describe_addresses, show, verdict
from blocktrain.dht.directory import Holder
from blocktrain.dht.swarm import dht_time
from blocktrain.protocol.records import PeerRecord
from blocktrain.protocol.spec import RunSpec

SPEC = RunSpec.from_mapping({"name": "tiny"})
PUBLIC = "/ip4/93.184.216.34/tcp/4001/p2p/12D3KooWx"


def holder(name: str, block: int, round_number: int = 4, denoising_ce: float | None = 1.25) -> Holder:
    record = PeerRecord(
        block=block,
        round=round_number,
        step=12_345,
        tokens_per_s=17_000.0,
        denoising_ce=denoising_ce,
        anchor="0" * 32,
        addresses=(PUBLIC,),
        version="0.1.0",
        time=dht_time() - 7,
    )
    return Holder(f"12D3KooW{name:x<44}", record, dht_time() + 30)


def printed(holders: Holders, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(SPEC, holders, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        ([2, 3, 2], "healthy: 3/3 blocks covered, 7 nodes, round 4"),
        ([2, 1, 1], "healthy: 3/3 blocks covered, 4 nodes, round 4; one holder only: blocks 1 and 2"),
        ([2, 0, 2], "degraded: nobody holds block 1 (4 nodes, round 4)"),
        ([0, 0, 1, 0], "degraded: nobody holds blocks 0, 1 and 3 (1 node, round 4)"),
        ([0, 0], "degraded: nobody holds any block"),
    ],
)
def test_the_verdict_is_one_sentence_about_what_matters_most(blocks: list[int], sentence: str) -> None:
    holders = {b: [holder(f"{b}-{i}", b) for i in range(count)] for b, count in enumerate(blocks)}
    assert verdict(holders) == sentence


def test_a_block_is_as_far_as_its_furthest_holder() -> None:
    holders = {0: [holder("a", 0, 7), holder("b", 0, 2)], 1: [holder("c", 1, 5), holder("d", 1, 5)]}
    assert verdict(holders) == "healthy: 2/2 blocks covered, 4 nodes, rounds 5 to 7"


def test_the_verdict_comes_first_and_every_holder_has_a_row_that_fits_a_narrow_terminal() -> None:
    holders = {0: [holder("Abcd1234", 0, 9), holder("Efgh5678", 0, 7, None)], 1: []}
    lines = printed(holders).splitlines()
    assert lines[0] == "degraded: nobody holds block 1 (2 nodes, round 9)"
    first = next(line for line in lines if "Abcd1234" in line).split()
    second = next(line for line in lines if "Efgh5678" in line).split()
    assert first == ["0", "Abcd1234", "9", "0", "12,345", "17,000", "1.250", "7", "0.1.0", "1:", "public"]
    assert second[2:7] == ["7", "2", "12,345", "17,000", "-"]
    assert any(line.split() == ["1", "nobody"] for line in lines)


def test_the_local_loss_is_never_shown_as_the_models_cross_entropy() -> None:
    text = printed({0: [holder("a", 0)]})
    assert text.splitlines()[2].split() == ["denoising"]
    assert text.splitlines()[3].split()[6] == "CE"
    assert "not the model's cross-entropy" in text


def test_the_document_has_the_promised_fields_and_is_json() -> None:
    holders = {0: [holder("a", 0, 3)], 1: []}
    document = json.loads(json.dumps(as_document(SPEC, holders), allow_nan=False))
    assert {"run", "fingerprint", "blocks"} == document.keys()
    assert (document["run"], document["fingerprint"]) == ("tiny", SPEC.fingerprint)
    assert document["blocks"][1] == {"block": 1, "holders": []}
    (fields,) = document["blocks"][0]["holders"]
    assert fields["age_s"] == pytest.approx(7, abs=1)
    assert {name: fields[name] for name in fields if name != "age_s"} == {
        "peer_id": holders[0][0].peer_id,
        "addresses": [PUBLIC],
        "round": 3,
        "step": 12_345,
        "tokens_per_s": 17_000.0,
        "version": "0.1.0",
        "denoising_ce": 1.25,
    }


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        ([], "none"),
        ([PUBLIC, PUBLIC.replace("4001", "4002")], "2: public"),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.1.2.3/tcp/1", PUBLIC], "3: public, private, loopback"),
        (["/ip6/::1/tcp/1", "/dns4/example.org/tcp/1"], "2: loopback, dns"),
        ([f"{PUBLIC}/p2p-circuit/p2p/12D3KooWy"], "1: relay"),
        (["/[red]garbage"], "1: dns"),
        (["/ip4/999.1.1.1/tcp/1"], "1: dns"),
    ],
)
def test_addresses_are_counted_and_sorted_by_where_they_lead(addresses: list[str], text: str) -> None:
    assert describe_addresses(addresses) == text
