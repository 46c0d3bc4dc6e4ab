"""Multiaddrs as people paste them: every form that works, and one clear line for every one that doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.protocol.addresses import parse_address, parse_addresses, peer_id_of
from blocktrain.protocol.errors import AddressError

ID = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"
RELAY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
A, B = f"/ip4/203.0.113.7/tcp/4001/p2p/{ID}", f"/ip6/2001:db8::1/tcp/4001/p2p/{RELAY}"


def check_line(message: str) -> None:
    """An error's message is one line that can't garble a terminal."""
    assert message.isprintable()
    assert len(message) < 400


def refusal(*values: str) -> str:
    with pytest.raises(AddressError) as caught:
        parse_addresses(values)
    check_line(str(caught.value))
    return str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        A,
        B,
        f"/dns4/example.org/tcp/443/wss/p2p/{ID}",
        f"/dns6/example.org/tcp/4001/p2p/{ID}",
        f"/dns/example.org/udp/4001/quic-v1/p2p/{ID}",
        f"/dnsaddr/bootstrap.example.org/p2p/{ID}",
        f"/ip6/::1/udp/4001/quic-v1/p2p/{ID}",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{ID}",
        f"/dns4/ipfs/tcp/4001/p2p/{ID}",
    ],
)
def test_addresses_that_can_be_dialled_are_kept_as_they_are(address: str) -> None:
    assert parse_address(address) == address
    assert parse_address(parse_address(address)) == address
    assert peer_id_of(address) in (ID, RELAY)


def test_other_spellings_become_one() -> None:
    for text in (A.replace("/p2p/", "/ipfs/"), A + "/", A.replace("4001", "04001")):
        assert parse_address(text) == A
    circuit = f"/ip4/203.0.113.7/tcp/4001/ipfs/{RELAY}/p2p-circuit/ipfs/{ID}"
    assert parse_address(circuit) == circuit.replace("/ipfs/", "/p2p/")
    assert peer_id_of(parse_address(circuit)) == ID


@pytest.mark.parametrize(
    "values",
    [[A, B], [f"{A},{B}"], [f"{A} {B}"], [f"{A}\n{B}\n"], [f"  {A} ,\r\n\t{B},"], [A, B, A], [f"{A},{A}", B]],
)
def test_repeats_commas_spaces_and_lines_all_work(values: list[str]) -> None:
    assert parse_addresses(values) == (A, B)


def test_no_value_gives_no_address() -> None:
    assert parse_addresses([]) == ()


def test_a_file_may_hold_comments_blank_lines_and_any_separator(tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_bytes(b"\xef\xbb\xbf# seeds\r\n\r\n  # /ip4/off\r\n" + f"{A}, {A}\r\n{B}".encode())
    assert parse_addresses([f"@{path}"]) == (A, B)
    assert parse_addresses([B, f"@{path}"]) == (B, A)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "comments").write_text("# nothing else\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "words").write_text("hello there\n")
    for name, told in {
        "comments": "holds no address",
        "binary": "not UTF-8 text",
        "endless": "larger than",
        "missing": "No such file",
        ".": "Is a directory",
        "words": "'hello': not a multiaddr",
    }.items():
        assert told in refusal(f"@{tmp_path / name}")
    assert "can't be read" in refusal("@")
    assert "can't be read" in refusal("@nul\0byte")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no address"),
        (" , \n", "holds no address"),
        ("203.0.113.7:4001", "not a multiaddr"),
        (ID, "not a multiaddr"),
        ("http://203.0.113.7/", "not a multiaddr"),
        ("/", "empty multiaddr"),
        ("/ip4", "missing value for protocol: ip4"),
        ("/ip4/203.0.113", "'203.0.113' is not IPv4"),
        ("/ip4/203.0.113.7", "has no port"),
        ("/ip4/203.0.113.7/tcp", "missing value for protocol: tcp"),
        ("/ip4/203.0.113.7/tcp/x", "invalid base 10 integer"),
        ("/ip4/203.0.113.7/tcp/65536", "integer not in range"),
        ("/ip4/203.0.113.7/tcp/4001", "must end in /p2p/PEER_ID; copy the whole line"),
        ("/ip4/203.0.113.7/tcp/4001/p2p", "missing value for protocol: p2p"),
        ("/ip4/203.0.113.7/tcp/4001/p2p/", "missing value for protocol: p2p"),
        (A[:-1], "the peer id is cut short or mistyped"),
        (A[:-30], "the peer id is cut short or mistyped"),
        (B[:-2], "the peer id is cut short or mistyped"),
        (A.replace("4001", "0"), "port 0 can't be dialled"),
        (f"/ip4/203.0.113.7/udp/0/quic-v1/p2p/{ID}", "port 0 can't be dialled"),
        (f"{A}/p2p-circuit", "must end in /p2p/PEER_ID"),
        (f"/p2p/{ID}", "/p2p can't be dialled"),
        ("/unix/tmp/socket", "/unix can't be dialled"),
        ("/memory/1", "/memory can't be dialled"),
        (f"/onion/x/p2p/{ID}", "/onion"),
        (f"/magic/1/p2p/{ID}", "unknown protocol: magic"),
        (f"/ip4/203.0.113.7/tcp/4001/\x1b[2J/p2p/{ID}", "holds a character that multiaddrs don't have"),
        (f"/dns4/bücher.example/tcp/4001/p2p/{ID}", "holds a character that multiaddrs don't have"),
        ("/ip4" * 500, "longer than 512 characters"),
    ],
)
def test_unusable_addresses_are_quoted_with_what_is_wrong(text: str, told: str) -> None:
    message = refusal(text)
    assert told in message
    assert repr(text[:4])[1:-1] in message


def test_the_first_bad_one_of_several_is_told() -> None:
    assert "'/ip4/1.2.3.4/tcp/1'" in refusal(f"{A},/ip4/1.2.3.4/tcp/1,{B}")


def test_an_address_to_listen_on_has_no_peer_and_may_have_port_0() -> None:
    for address in ("/ip4/0.0.0.0/tcp/0", "/ip6/::/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/4001"):
        assert parse_address(address, listening=True) == address
    for address, told in (
        (A, "has no /p2p/PEER_ID"),
        ("/ip4/0.0.0.0", "has no port"),
        ("4001", "not a multiaddr"),
    ):
        with pytest.raises(AddressError, match=told):
            parse_address(address, listening=True)


NAMES = "ip4 1.2.3.4 ip6 ::1 ip6zone dns4 dnsaddr tcp udp 0 4001 quic-v1 p2p ipfs p2p-circuit unix onion3 x"
parts = st.sampled_from([*NAMES.split(), ID, RELAY, ""])


@given(
    st.lists(parts, max_size=10).map(lambda steps: "/" + "/".join(steps)) | st.text(max_size=60),
    st.booleans(),
)
def test_any_text_is_an_address_or_one_line_of_our_error(text: str, listening: bool) -> None:
    try:
        address = parse_address(text, listening=listening)
    except AddressError as error:
        check_line(str(error))
    else:
        assert address.isascii()
        assert parse_address(address, listening=listening) == address
        assert listening or peer_id_of(address) in (ID, RELAY)


@given(st.text(max_size=40).filter(lambda text: not text.startswith("@/")))
def test_any_text_on_the_command_line_is_an_address_or_our_error(text: str) -> None:
    with pytest.raises(AddressError):
        parse_addresses([text])
