"""One reading of a link, and the addresses that may stand behind it."""

from __future__ import annotations

import ipaddress
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.media.links import canonical_host, is_data, is_public, literal, may_connect, read_link

PRIVATE_V4 = (
    "10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.255.0.1 169.254.169.254 172.16.0.1 172.31.9.9"
    " 192.0.0.192 192.168.1.1 198.18.0.1 203.0.113.9 0.0.0.0 0.1.2.3 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255"
    " 168.63.129.16 192.88.99.1"
).split()
PRIVATE_V6 = (
    ":: ::1 fe80::1 fec0::1 fd00:ec2::254 fc00::1 ff02::1 2001:db8::1 2001::1 2001:2::1 100::1 3fff::1 5f00::1"
    " 64:ff9b:1::808:808 ::8.8.8.8 4000::1"
).split()
PUBLIC = "8.8.8.8 1.1.1.1 172.32.0.1 100.128.0.1 2606:4700::1111 2a00:1450::1 2620:fe::fe 240e::1".split()

PRIVATE_BLOCKS = ["10.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"]


@st.composite
def private_v4(draw: st.DrawFn) -> IPv4Address:
    block = ip_network(draw(st.sampled_from(PRIVATE_BLOCKS)))
    return IPv4Address(int(block[0]) + draw(st.integers(0, block.num_addresses - 1)))


def embedded(inner: IPv4Address) -> list[IPv6Address]:
    """All the IPv6 addresses that lead to an IPv4 one, by somebody's rules."""
    number = int(inner)
    return [
        IPv6Address(0xFFFF << 32 | number),  # mapped
        IPv6Address(number),  # compatible
        IPv6Address(int(IPv6Address("64:ff9b::")) | number),  # NAT64
        IPv6Address(int(IPv6Address("64:ff9b:1::")) | number),
        IPv6Address(0x2002 << 112 | number << 80),  # 6to4
        IPv6Address(0x2002 << 112 | number << 80 | 1),
        IPv6Address(0x20010000 << 96 | (number ^ 0xFFFFFFFF)),  # Teredo: the client's address, inverted
        IPv6Address(0x20010000 << 96 | number << 64),  # Teredo: the server's
        IPv6Address(int(IPv6Address("2a00:1::")) | 0x5EFE << 32 | number),  # ISATAP
        IPv6Address(int(IPv6Address("::ffff:0:0:0")) | number),  # SIIT
    ]


@pytest.mark.parametrize("address", PRIVATE_V4 + PRIVATE_V6)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))
    assert not may_connect(ip_address(address), ())


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert may_connect(ip_address(address), ())


@given(private_v4())
@settings(max_examples=200, deadline=None)
def test_no_other_form_of_a_private_address_is_public(inner: IPv4Address) -> None:
    assert not may_connect(inner, ())
    for outer in embedded(inner):
        assert not may_connect(outer, ()), outer


@given(st.integers(0, 2**32 - 1).map(IPv4Address) | st.integers(0, 2**128 - 1).map(IPv6Address))
@settings(max_examples=500, deadline=None)
def test_nothing_is_public_that_the_library_knows_to_be_private(address: IPv4Address | IPv6Address) -> None:
    """The registries as of another hand: ours may be stricter, and must not be laxer."""
    if is_public(address):
        assert address.is_global and not address.is_multicast and not address.is_reserved


def test_a_public_address_behind_nat64_is_as_good_as_itself() -> None:
    """On networks with IPv6 only every name leads to such an address."""
    assert may_connect(ip_address("64:ff9b::808:808"), ())
    assert may_connect(ip_address("::ffff:8.8.8.8"), ())


def test_networks_open_what_is_in_them_and_nothing_else() -> None:
    networks = (ip_network("10.0.5.0/24"), ip_network("fd00::/8"))
    for inside in ("10.0.5.7", "fd00:ec2::1", "::ffff:10.0.5.7"):
        assert may_connect(ip_address(inside), networks), inside
    for outside in ("10.0.6.7", "127.0.0.1", "fe80::1", "::ffff:10.0.6.7"):
        assert not may_connect(ip_address(outside), networks), outside
    everything = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    assert may_connect(ip_address("169.254.169.254"), everything)
    for never in ("0.0.0.0", "::", "224.0.0.1", "ff02::1"):  # no single host has one of these
        assert not may_connect(ip_address(never), everything), never


def test_an_address_that_was_written_down_is_meant() -> None:
    for meant in ("10.0.5.7", "127.0.0.1", "::1", "fd00::1", "100.64.0.1"):
        assert may_connect(ip_address(meant), (), named=True), meant
    for never in ("169.254.169.254", "fe80::1", "0.0.0.0", "224.0.0.1", "255.255.255.255"):
        assert not may_connect(ip_address(never), (), named=True), never


# --- reading
ODD = [
    "http://2130706433/",
    "http://017700000001/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://127.0.0.01/",
    "http://1.2.3.4.5/",
    "http://256.1.1.1/",
    "http://a.0x7f/",
    "http://0x/",
    "http://a@127.0.0.1/",
    "http://:@a/",
    "http://@a/",
    "http://a:b@c/",
    "http://a\\@b/",
    "http:\\\\a/",
    "http://a/\\x",
    "http://a\tb/",
    "http://a\n/",
    " http://a/",
    "http://a/ ",
    "http://a b/",
    "http://a/\x00",
    "http://a/\x7f",
    "http://a%2eb/",
    "http://%61/",
    "http://[fe80::1%25eth0]/",
    "http://[fe80::1%1]/",
    "http://[::1",
    "http://::1/",
    "http://[::1]x/",
    "http://x[::1]/",
    "http://[127.0.0.1]/",
    "http://[v1.a]/",
    "http://[]/",
    "http://a:0/",
    "http://a:65536/",
    "http://a:8x/",
    "http://a:-1/",
    "http://a:\u0668\u0660/",
    "http://a..b/",
    "http://.a/",
    "http://-/",
    "http://",
    "http:///a",
    "http:a",
    "http:/a",
    "//a/",
    "/a",
    "a",
    "",
    "ftp://a/",
    "file:///etc/passwd",
    "file://a/b",
    "gopher://a/",
    "javascript:1",
    "data:x",
    "HTTPS//a",
    "http://a" + "a" * 64 + ".b/",
    "http://" + "a." * 127 + "ab/",
    "http://\u2488\u2488/",
    "http://a\u200bb.example/\u200b",
    "unix:/run/x.sock",
    "http+unix://x/",
]


@pytest.mark.parametrize("link", ODD)
def test_links_that_somebody_would_read_differently(link: str) -> None:
    assert read_link(link) is None


@pytest.mark.parametrize(
    ("link", "host", "port", "path"),
    [
        ("http://A.Example", "a.example", 80, "/"),
        ("https://a.example.:443/x?y=z#part", "a.example", 443, "/x?y=z"),
        ("HTTPS://a.example:8443/%2e%2e/b", "a.example", 8443, "/%2e%2e/b"),
        ("http://a.example:/", "a.example", 80, "/"),
        ("http://a.example/\u00e4?\u00f6", "a.example", 80, "/%C3%A4?%C3%B6"),
        ("http://a?x", "a", 80, "/?x"),
        ("http://b\u00fccher.example/", "xn--bcher-kva.example", 80, "/"),
        ("http://a\u3002example/", "a.example", 80, "/"),
        ("http://10.0.0.7/", "10.0.0.7", 80, "/"),
        ("http://\uff11\uff10.0.0.7/", "10.0.0.7", 80, "/"),
        ("http://[2001:DB8:0::1]:81/", "2001:db8::1", 81, "/"),
        ("http://[::ffff:10.0.0.1]/", "::ffff:a00:1", 80, "/"),
        ('http://a_b.example/x"<>|', "a_b.example", 80, "/x%22%3C%3E%7C"),
        ("http://a/b@c:d", "a", 80, "/b@c:d"),
    ],
)
def test_one_canonical_form(link: str, host: str, port: int, path: str) -> None:
    target = read_link(link)
    assert target is not None
    assert (target.host, target.port, target.path) == (host, port, path)
    assert read_link(target.url) == target


def written(inner: IPv4Address) -> list[str]:
    """An IPv4 address as hosts of links have been seen to hide it."""
    number, parts = int(inner), str(inner).split(".")
    octal, hexadecimal = [f"0{int(part):o}" for part in parts], [f"0x{int(part):x}" for part in parts]
    wide = str(inner).translate({ord("0") + digit: 0xFF10 + digit for digit in range(10)})
    return [
        str(inner),
        f"{inner}.",
        str(number),
        hex(number),
        f"0{number:o}",
        ".".join(octal),
        ".".join(hexadecimal),
        ".".join([hexadecimal[0], *parts[1:]]),
        f"{parts[0]}.{number & 0xFFFFFF}",
        f"{parts[0]}.{parts[1]}.{number & 0xFFFF}",
        "00" + str(inner),
        wide,
        str(inner).replace(".", "\u3002"),
        str(inner).replace(".", "\uff0e"),
        str(inner).replace(".", "%2e"),
        f"user@{inner}",
        f"images.example@{inner}",
        f"images.example:80@{inner}",
        f"{inner}#@images.example",
        f"{inner}\\@images.example",
        f"images.example\t@{inner}",
        f"{inner}:80",
        *[f"[{outer}]" for outer in embedded(inner)],
        f"[::ffff:{inner}]",
        f"[{inner}]",
        f"[::ffff:{inner}%25lo]",
    ]


@given(private_v4(), st.sampled_from(["http", "https", "HTTP"]), st.sampled_from(["", "/", "/x", "?y", "#z", ":81/"]))
@settings(max_examples=300, deadline=None)
def test_no_spelling_of_a_private_address_leads_there(inner: IPv4Address, scheme: str, rest: str) -> None:
    """Whatever is accepted is either an address, which is judged as one, or a name that no library takes for one."""
    for host in written(inner):
        target = read_link(f"{scheme}://{host}{rest}")
        if target is None:
            continue
        address = literal(target.host)
        if address is not None:
            assert not may_connect(address, ()), host
        else:
            with pytest.raises(OSError, match="illegal"):
                socket.inet_aton(target.host)


HOSTS = st.text(st.sampled_from("01289abxX.:[]%@/\\#?-_~\u3002\uff0e\uff11\u00e4\u200b \t0x"), max_size=24)


@given(HOSTS | st.text(max_size=24), st.text(st.sampled_from("/a?#@:\\."), max_size=6))
@settings(max_examples=1000, deadline=None)
def test_whatever_is_accepted_is_read_alike_by_others(host: str, rest: str) -> None:
    link = f"http://{host}{rest}"
    target = read_link(link)
    if target is None:
        return
    assert read_link(target.url) == target
    assert urlsplit(target.url).hostname == target.host
    assert httpx.URL(target.url).raw_host.decode() == target.host
    if literal(target.host) is None:
        with pytest.raises(OSError, match="illegal"):
            socket.inet_aton(target.host)
    if link.isascii():
        assert canonical_host(httpx.URL(link).raw_host.decode()) == target.host


def test_hosts_of_the_list_have_the_same_form() -> None:
    assert canonical_host("Images.Example.") == "images.example"
    assert canonical_host("0:0:0:0:0:0:0:1") == str(ipaddress.ip_address("::1"))
    assert canonical_host("2130706433") is None and canonical_host("10.0.0.1") == "10.0.0.1"


# --- data
@pytest.mark.parametrize(
    "link",
    [
        "data:image/png;base64,AAAA",
        "DATA:image/png;base64,AAAA",
        "data:,",
        "data:;base64,x",
        "data:text/plain;charset=utf-8,x",
    ],
)
def test_content_in_a_link(link: str) -> None:
    assert is_data(link)


@pytest.mark.parametrize(
    "link",
    [
        "data:/etc/passwd",
        "data:x",
        "data:",
        "datas:,",
        "data://host/,",
        "data:../x,",
        "data:image/png",
        " data:,",
        "data:a/b/c,",
        "data:" + "a" * 300 + ",",
    ],
)
def test_what_only_begins_like_it(link: str) -> None:
    assert not is_data(link)
