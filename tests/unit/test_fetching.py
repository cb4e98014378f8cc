"""What requests link to, fetched over real sockets: from whom, at which address, how much of it and for how long."""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from base64 import b64decode
from collections.abc import Callable, Coroutine, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest, GatewayError
from gateway.media import Link, MediaRules, fetching
from gateway.media.fetching import Held, fetch_links
from gateway.media.filetypes import agree, sniff
from gateway.media.links import may_connect, read_link
from tests.doubles import files
from tests.doubles.engine import Certificates
from tests.doubles.files import GIF, JPEG, MP4, PNG, WAV, Page, page, redirect, serving

HERE = (ip_network("127.0.0.2/32"),)
NAMES = frozenset({"images.example", "other.example", "127.0.0.2", "127.0.0.3", "localhost"})


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(*args, **options)

        asyncio.run(bounded())

    return run


def rules(**more: Any) -> MediaRules:
    return MediaRules(**{"hosts": NAMES, "networks": HERE, "timeout": 20.0} | more)


class Names:
    """Look-ups with answers of the test's own: one after the other, the last one for ever."""

    def __init__(self, *answers: Sequence[str], fails: Exception | None = None) -> None:
        self.answers, self.asked = list(answers), list[str]()
        self._fails = fails

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if self._fails is not None:
            raise self._fails
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def link(url: str, place: int = 0) -> Link:
    target = read_link(url)
    assert target is not None
    return Link(("messages", 0, "content", place, "image_url", "url"), target)


async def fetch(url: str, given: MediaRules | None = None, names: Names | None = None) -> tuple[str, bytes]:
    """Media type and content. The name `images.example` is the server at 127.0.0.2."""
    found = await fetch_links([link(url)], 100, given or rules(), names or Names(["127.0.0.2"]))
    (uri,) = found.values()
    head, _, body = uri.partition(";base64,")
    return head.removeprefix("data:"), b64decode(body, validate=True)


async def refused(url: str, given: MediaRules | None = None, names: Names | None = None) -> str:
    with pytest.raises(BadRequest) as caught:
        await fetch(url, given, names)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "media_unavailable", "messages[0].content[0].image_url")
    for secret in ("127.0.0", "10.0.0", "169.254", "Error", "Errno", "Traceback"):
        assert secret not in error.message, error.message
    return error.message


# --- what comes back
@pytest.mark.parametrize("size", [0, 1, 2, 3, 3 << 18, (3 << 18) + 1, 2_000_000])
@asynchronous
async def test_a_file_comes_whole(size: int) -> None:
    content = PNG + bytes(size)
    with serving({"/a.png": page(content)}) as server:
        assert await fetch(f"http://images.example:{server.port}/a.png?size={size}#part") == ("image/png", content)
        (visit,) = server.visits
    assert visit.target == f"/a.png?size={size}"
    assert visit.header("host") == f"images.example:{server.port}"
    assert visit.header("accept-encoding") == "identity"
    for name in ("cookie", "authorization", "referer"):
        assert visit.header(name) is None


@pytest.mark.parametrize(
    ("content", "said", "kind"),
    [
        (PNG, "image/png", "image/png"), (PNG, "image/jpeg; charset=x", "image/png"),
        (JPEG, "IMAGE/JPEG", "image/jpeg"),
        (PNG, "application/octet-stream", "image/png"), (WAV, "audio/x-wav", "audio/wav"),
        (MP4, "video/mp4", "video/mp4"),
        (MP4, "audio/mp4", "audio/mp4"), (b"OggS" + bytes(9), "application/ogg", "audio/ogg"),
        (b"OggS" + bytes(9), "video/ogg", "video/ogg"), (GIF, "", "image/gif"),
    ],
)  # fmt: skip
@asynchronous
async def test_the_type_is_that_of_the_bytes(content: bytes, said: str, kind: str) -> None:
    with serving({"/x": page(content, said)}) as server:
        assert await fetch(f"http://images.example:{server.port}/x") == (kind, content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html><img src=http://127.0.0.1/></html>", "image/png"), (b"{}", "image/png"), (b"", "image/png"),
        (PNG, "text/html"), (PNG, "video/mp4"), (WAV, "image/png"), (MP4, "image/png"), (b"secret", "text/plain"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), (b"%PDF-1.7", "application/pdf"),
        (b"#EXTM3U\nhttp://127.0.0.1/\n", "video/mp4"), (b"ffconcat version 1.0\nfile /etc/passwd", "video/mp4"),
        (b"ID3\x04\0\0\0\0\0\x02xx#EXTM3U\nhttp://127.0.0.1/\n", "audio/mpeg"), (b"<MPD></MPD>", "video/mp4"),
        (b"root:x:0:0:", "application/octet-stream"), (b"root:x:0:0:", ""), (b"BM=1\nBM=2\n", "image/bmp"),
    ],
)  # fmt: skip
@asynchronous
async def test_what_is_no_medium_is_refused(content: bytes, said: str) -> None:
    with serving({"/x": page(content, said)}) as server:
        assert "no image, sound or video" in await refused(f"http://images.example:{server.port}/x")


def test_sounds_behind_tags() -> None:
    sound = b"\xff\xfb\x90\x00" + bytes(100)
    tag = b"ID3\x04\0\0\0\0\x01\x00" + bytes(128)
    assert sniff(tag + sound) == sniff(tag + tag + sound) == sniff(tag + bytes(4) + sound) == "audio/mpeg"
    assert sniff(tag) is sniff(b"ID3") is sniff(tag + PNG) is sniff(tag * 9 + sound) is None
    assert sniff(tag + b"#EXTM3U") is None
    assert sniff(b"FORM\0\0\0\0AIFF") == "audio/aiff" and sniff(b"\xff\xf1\x50\x80") == "audio/aac"
    assert agree("video/webm", "audio/ogg") == "video/ogg" and agree("application/ogg", "video/webm") is None


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_text_is_never_a_medium(content: bytes) -> None:
    """Whatever may name further addresses, playlists and documents, is text, or begins with it."""
    text = b"\n" + content
    assert sniff(text) is None or not text.isascii()


# --- addresses
@asynchronous
async def test_the_address_that_was_checked_is_the_one_that_is_used() -> None:
    """Rebinding: the second look-up would lead elsewhere. There is none."""
    with serving({"/x": page(PNG)}) as server, serving({"/x": page(GIF)}, "127.0.0.9") as victim:
        names = Names(["127.0.0.2"], ["127.0.0.9"])
        assert await fetch(f"http://images.example:{server.port}/x", names=names) == ("image/png", PNG)
        assert names.asked == ["images.example"] and not victim.connections
        assert "fetches nothing from" in await refused(f"http://images.example:{victim.port}/x", names=names)
        assert not victim.connections


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.9"], ["127.0.0.2", "127.0.0.9"], ["8.8.8.8", "10.0.0.1"], ["::ffff:127.0.0.9"], ["::1"], ["0.0.0.0"],
     ["169.254.169.254"], ["fe80::1%eth0"], ["64:ff9b::7f00:9"], ["2002:7f00:9::"], ["100.64.0.1"], ["224.0.0.1"],
     ["::"]],
)  # fmt: skip
@asynchronous
async def test_one_address_that_is_not_permitted_is_too_many(addresses: list[str]) -> None:
    with serving({"/x": page(PNG)}, "127.0.0.9") as victim:
        url = f"http://images.example:{victim.port}/x"
        assert "leads to an address" in await refused(url, names=Names(addresses))
        assert not victim.connections


@given(
    st.lists(
        st.integers(0, 2**32 - 1).map(ip_address) | st.integers(0, 2**128 - 1).map(ip_address), min_size=1, max_size=4
    )
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_answer_of_a_look_up_opens_more_than_is_permitted(found: list[Any]) -> None:
    target = read_link("http://images.example/")
    assert target is not None

    async def addresses() -> Sequence[Any]:
        return await fetching._addresses(target, MediaRules(hosts=NAMES), Names([str(one) for one in found]))

    if all(may_connect(one, ()) for one in found):
        assert asyncio.run(addresses()) == found[: fetching.MOST_ADDRESSES]
    else:
        with pytest.raises(fetching.Unavailable):
            asyncio.run(addresses())


@asynchronous
async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    networks = (ip_network("127.0.0.0/8"),)
    with serving({"/x": page(PNG)}) as server:
        url = f"http://images.example:{server.port}/x"
        assert (await fetch(url, rules(networks=networks), Names(["127.0.0.77", "127.0.0.2"])))[1] == PNG
        assert "cannot be reached" in await refused(url, rules(networks=networks), Names(["127.0.0.77"]))


@asynchronous
async def test_addresses_on_the_list_need_no_network() -> None:
    with serving({"/x": page(PNG)}) as server:
        names = Names(["127.0.0.9"])
        assert (await fetch(f"{server.url}/x", rules(networks=()), names))[1] == PNG
        assert not names.asked
        # The name of the same host is another matter: who owns it decides where it leads.
        url = f"http://images.example:{server.port}/x"
        assert "leads to an address" in await refused(url, rules(networks=()), Names(["127.0.0.2"]))


@pytest.mark.parametrize("error", [OSError("no such host"), UnicodeError("label too long"), ValueError("x")])
@asynchronous
async def test_names_that_do_not_resolve(error: Exception) -> None:
    assert "cannot be reached" in await refused("http://images.example/", names=Names(fails=error))
    assert "has no address" in await refused("http://images.example/", names=Names([]))


@asynchronous
async def test_real_look_ups() -> None:
    given = rules(networks=(ip_network("127.0.0.0/8"), ip_network("::1/128")))
    with serving({"/x": page(PNG)}, "127.0.0.1") as server:
        found = await fetch_links([link(f"http://localhost:{server.port}/x")], 0, given)
        assert len(found) == 1
        with pytest.raises(BadRequest, match="leads to an address"):
            await fetch_links([link(f"http://localhost:{server.port}/x")], 0, rules(networks=()))
        assert server.connections == 1


@asynchronous
async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"/x": page(PNG)}) as server, serving({}, "127.0.0.9") as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert (await fetch(f"http://images.example:{server.port}/x"))[1] == PNG
        assert not proxy.connections


# --- redirects
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/b", "b", "//images.example:{port}/b", "http://127.0.0.2:{port}/b", "?x"])
@asynchronous
async def test_redirects_are_followed(status: int, location: str) -> None:
    def first(visit: files.Visit) -> None:
        (page(PNG) if "?" in visit.target else redirect(location.format(port=server.port), status))(visit)

    with serving({"/a": first, "/b": page(PNG)}) as server:
        names = Names(["127.0.0.2"])
        assert (await fetch(f"http://images.example:{server.port}/a", names=names))[1] == PNG
        assert len(server.visits) == 2


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.9:{port}/b", "http://localhost.example/b", "http://2130706433:{port}/b", "file:///etc/passwd",
     "http://images.example@127.0.0.9:{port}/", "//127.0.0.9:{port}/b", "http://[::ffff:127.0.0.9]:{port}/b", "data:,x",
     "ftp://images.example/", "", "http://169.254.169.254/latest/", "http://127.1:{port}/", "\\\\\\\\127.0.0.9/x"],
)  # fmt: skip
@asynchronous
async def test_redirects_elsewhere_are_refused(location: str) -> None:
    with serving({"/b": page(PNG)}, "127.0.0.9") as victim:
        with serving({"/a": redirect(location.format(port=victim.port))}) as server:
            await refused(f"http://images.example:{server.port}/a")
            assert len(server.visits) == 1
        assert not victim.connections


@asynchronous
async def test_redirects_to_a_listed_name_at_a_wrong_address_are_refused() -> None:
    with serving({"/b": page(PNG)}, "127.0.0.9") as victim:
        with serving({"/a": redirect(f"http://other.example:{victim.port}/b")}) as server:
            names = Names(["127.0.0.2"], ["127.0.0.9"])
            assert "leads to an address" in await refused(f"http://images.example:{server.port}/a", names=names)
            assert names.asked == ["images.example", "other.example"]
        assert not victim.connections


@pytest.mark.parametrize(("hops", "good"), [(3, True), (4, False)])
@asynchronous
async def test_the_number_of_redirects_is_bounded(hops: int, good: bool) -> None:
    pages: dict[str, Page] = {f"/{number}": redirect(f"/{number + 1}") for number in range(hops)}
    with serving({**pages, f"/{hops}": page(PNG)}) as server:
        url = f"http://images.example:{server.port}/0"
        if good:
            assert (await fetch(url))[1] == PNG
        else:
            assert "more than 3 times" in await refused(url)
            assert len(server.visits) == 4


# --- bounds
@asynchronous
async def test_endless_files_are_left() -> None:
    with serving({"/x": files.endless}) as server:
        assert "larger than 1000000 bytes" in await refused(
            f"http://images.example:{server.port}/x", rules(max_size=1_000_000)
        )
        (visit,) = server.visits
        assert await asyncio.to_thread(visit.gone.wait, 20)


@asynchronous
async def test_files_that_say_they_are_large_are_not_read() -> None:
    with serving({"/x": files.large}) as server:
        assert "larger than" in await refused(f"http://images.example:{server.port}/x")


@pytest.mark.parametrize("extra", [0, 1])
@asynchronous
async def test_the_largest_file(extra: int) -> None:
    """To the byte, with and without a length."""

    def untold(visit: files.Visit) -> None:
        visit.begin(200, {"content-type": "image/png"})
        visit.write(content)

    content = PNG + bytes(1000 - len(PNG) % 1000 + extra)
    given = rules(max_size=len(content) - extra)
    with serving({"/told": page(content), "/untold": untold}) as server:
        for path in ("told", "untold"):
            url = f"http://images.example:{server.port}/{path}"
            if extra:
                assert "larger than" in await refused(url, given)
            else:
                assert (await fetch(url, given))[1] == content


@pytest.mark.parametrize("answer", [files.silent, files.dripping])
@asynchronous
async def test_slow_files_are_left(answer: Page) -> None:
    with serving({"/x": answer}) as server:
        assert "within 0.2 s" in await refused(f"http://images.example:{server.port}/x", rules(timeout=0.2))
        (visit,) = server.visits
        assert await asyncio.to_thread(visit.gone.wait, 20)


@asynchronous
async def test_slow_look_ups_count() -> None:
    async def never(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(BadRequest, match=r"within 0\.1 s"):
        await fetch_links([link("http://images.example/")], 0, rules(timeout=0.1), never)


@pytest.mark.parametrize("answer", [files.bomb, files.zipped])
@asynchronous
async def test_compressed_files_are_not_unpacked(answer: Page) -> None:
    with serving({"/x": answer}) as server:
        assert "compressed" in await refused(f"http://images.example:{server.port}/x")


@pytest.mark.parametrize("answer", [files.cut, lambda visit: None, lambda visit: visit.write(b"SSH-2.0-x\r\n\r\n")])
@asynchronous
async def test_broken_answers(answer: Page) -> None:
    with serving({"/x": answer}) as server:
        assert "speak HTTP" in await refused(f"http://images.example:{server.port}/x")


@pytest.mark.parametrize("status", [204, 206, 304, 401, 404, 500])
@asynchronous
async def test_other_statuses(status: int) -> None:
    with serving({"/x": lambda visit: visit.begin(status, {"content-length": "0"})}) as server:
        assert f"answered {status}" in await refused(f"http://images.example:{server.port}/x")


# --- several
@asynchronous
async def test_links_are_fetched_at_once_and_each_but_once() -> None:
    together = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waiting(visit: files.Visit) -> None:
        if len(server.visits) == 3:
            loop.call_soon_threadsafe(together.set)
        asyncio.run_coroutine_threadsafe(together.wait(), loop).result(20)
        page(PNG + visit.target.encode())(visit)

    with serving({f"/{number}": waiting for number in range(3)}) as server:
        links = [link(f"http://images.example:{server.port}/{number % 3}", number) for number in range(6)]
        found = await fetch_links(links, 0, rules(), Names(["127.0.0.2"]))
        assert list(found) == [one.way for one in links] and len(set(found.values())) == 3
        assert found[links[1].way] == found[links[4].way]
        assert len(server.visits) == 3


@asynchronous
async def test_a_failure_ends_the_others_and_is_named() -> None:
    with serving({"/slow": files.silent, "/ok": page(PNG)}) as server:
        links = [
            link(f"http://images.example:{server.port}/{path}", place) for place, path in enumerate(("slow", "no"))
        ]
        with pytest.raises(BadRequest) as caught:
            await fetch_links(links, 0, rules(), Names(["127.0.0.2"]))
        assert caught.value.param == "messages[0].content[1].image_url" and "404" in caught.value.message
        for visit in [visit for visit in server.visits if visit.target == "/slow"]:
            assert await asyncio.to_thread(visit.gone.wait, 20)


@pytest.mark.parametrize(("uses", "good"), [(1, True), (2, True), (3, False)])
@asynchronous
async def test_all_files_of_a_request_are_bounded_together(uses: int, good: bool) -> None:
    """As they will be sent: in base64, and as often as they are used."""
    content = PNG + bytes(300_000)
    with serving({"/x": page(content)}) as server:
        links = [link(f"http://images.example:{server.port}/x", place) for place in range(uses)]
        given = rules(max_total=1_000_000)
        if good:
            found = await fetch_links(links, 100, given, Names(["127.0.0.2"]))
            assert sum(map(len, found.values())) < 1_000_000
        else:
            with pytest.raises(BadRequest, match="too large with all"):
                await fetch_links(links, 100, given, Names(["127.0.0.2"]))


@asynchronous
async def test_who_stops_waiting_stops_the_fetch() -> None:
    arrived, loop = asyncio.Event(), asyncio.get_running_loop()

    def answer(visit: files.Visit) -> None:
        loop.call_soon_threadsafe(arrived.set)
        files.dripping(visit)

    with serving({"/x": answer}) as server:
        task = asyncio.create_task(fetch(f"http://images.example:{server.port}/x"))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.visits[0].gone.wait, 20)


@asynchronous
async def test_mistakes_of_our_own_are_no_faults_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(content: bytes) -> str:
        raise KeyError

    monkeypatch.setattr(fetching, "sniff", broken)
    with serving({"/x": page(PNG)}) as server, pytest.raises(ExceptionGroup):
        await fetch(f"http://images.example:{server.port}/x")


@asynchronous
async def test_the_log_names_the_host_for_its_operator_and_no_address(caplog: pytest.LogCaptureFixture) -> None:
    fetching._warn.cache_clear()
    with caplog.at_level(logging.DEBUG, "sekisho"):
        for _ in range(3):
            await refused("http://images.example/secret?token=x", names=Names(["10.0.0.7"]))
        await refused("http://images.example/secret?token=x", names=Names(fails=OSError("10.0.0.7")))
    said = caplog.text
    assert said.count("allow_networks") == 1 and "images.example" in said
    assert "10.0.0.7" not in said and "secret" not in said and "token" not in said


# --- TLS
@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))  # for localhost and 127.0.0.1


def trusting(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    context = ssl.create_default_context(cafile=str(file))
    monkeypatch.setattr(fetching, "_verified", lambda: context)


@asynchronous
async def test_tls_verifies_the_name_and_not_the_address(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting(monkeypatch, certificates.ca_file)
    with serving({"/x": page(PNG)}, tls=certificates.server_context()) as server:
        for url, good in (("localhost", True), ("images.example", False), ("127.0.0.2", False)):
            address = f"https://{url}:{server.port}/x"
            if good:
                assert (await fetch(address))[1] == PNG
            else:
                assert "cannot be reached" in await refused(address)
        assert len(server.visits) == 1


@asynchronous
async def test_tls_verifies_addresses_that_are_meant(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting(monkeypatch, certificates.ca_file)
    given = rules(hosts=frozenset({"127.0.0.1"}), networks=())
    with serving({"/x": page(PNG)}, "127.0.0.1", tls=certificates.server_context()) as server:
        assert (await fetch(f"{server.url}/x", given))[1] == PNG


@asynchronous
async def test_unknown_authorities_are_not_trusted(certificates: Certificates) -> None:
    with serving({"/x": page(PNG)}, tls=certificates.server_context()) as server:
        assert "cannot be reached" in await refused(f"https://localhost:{server.port}/x")
        assert not server.visits


@asynchronous
async def test_no_redirect_leads_out_of_tls(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting(monkeypatch, certificates.ca_file)
    with serving({"/b": page(PNG)}) as plain:
        pages = {"/a": redirect(f"http://images.example:{plain.port}/b"), "/c": redirect("/d"), "/d": page(PNG)}
        with serving(pages, tls=certificates.server_context()) as server:
            assert "redirected" in await refused(f"https://localhost:{server.port}/a")
            assert (await fetch(f"https://localhost:{server.port}/c"))[1] == PNG
        assert not plain.connections


@asynchronous
async def test_what_all_requests_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a fetch succeeds or fails; and one request alone may be as large as requests may be."""
    monkeypatch.setattr(fetching, "MOST_HELD", 600_000)
    with serving({"/x": page(PNG + bytes(300_000))}) as server:

        async def fetch_for(held: Held) -> None:
            links = [link(f"http://images.example:{server.port}/x")]
            await fetch_links(links, 100, rules(), Names(["127.0.0.2"]), held)

        first, second, third = Held(), Held(), Held()
        await fetch_for(first)
        with pytest.raises(GatewayError, match="Send the request again later") as caught:
            await fetch_for(second)
        assert (caught.value.status, caught.value.code) == (503, "media_busy") and caught.value.retry_after
        second.let_go()
        first.let_go()
        await fetch_for(third)
        third.let_go()
        assert Held.together == 0
        monkeypatch.setattr(fetching, "MOST_HELD", 100)
        await fetch_for(third)
        third.let_go()
