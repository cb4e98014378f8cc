"""Links in requests: what may be fetched by an engine, and what is refused before anybody connects."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.media import check_media

ALLOWED = frozenset({"images.example", "10.0.0.7"})
NONE: frozenset[str] = frozenset()


def body(link: Any, kind: str = "image_url", *, flat: bool = False, typed: bool = True) -> dict[str, Any]:
    part = {kind: link if flat else {"url": link}}
    if typed:
        part["type"] = kind
    return {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "x"}, part]},
        ]
    }


INSIDE = [
    "http://169.254.169.254/latest/", "http://127.0.0.1:9/", "http://[::ffff:10.0.0.1]/", "http://2130706433/",
    "http://0x7f.1/", "http://localhost/", "file:///etc/passwd", "ftp://images.example/x", "gopher://images.example/",
    "https://example.com/cat.png", "//images.example/x", "images.example/x", "", " ", "x", "datas:x", "/etc/passwd",
    " data:image/png;base64,AA", "javascript:1", "http://", "http:///images.example", "http://[", "http://[::1",
]  # fmt: skip
DISGUISED = [
    "http://images.example@evil.example/", "http://images.example:80@evil.example/", "http://evil.example#@images.example/",
    "http://evil.example/@images.example", "http://evil.example?@images.example", "http://evil.example\\@images.example/",
    "http://images.example\\.evil.example/", "http://images.example.evil.example/", "http://evil.images.example/",
    "http://user@images.example/", "http://images.example /", "http://images.example\n.evil.example/",
    "http://images.example\t/", "http://images.example%2eevil.example/", "http://images.example\u3002evil.example/",
]  # fmt: skip
DATA = ["data:image/png;base64,AAAA", "DATA:image/png;base64,AAAA", "data:,", "data:" + "A" * 3_000_000]


def refused(given: dict[str, Any], hosts: frozenset[str] = ALLOWED) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        check_media(given, hosts)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("link", INSIDE + DISGUISED)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("typed", [True, False])
def test_other_links_are_refused(link: str, flat: bool, typed: bool) -> None:
    """With and without a type: engines take a bare `{"image_url": ...}` as well."""
    for hosts in (NONE, ALLOWED):
        error = refused(body(link, flat=flat, typed=typed), hosts)
        assert error.param == "messages[1].content[1].image_url"
        assert not link or len(link) < 4 or link not in error.message


@pytest.mark.parametrize("link", DATA)
@pytest.mark.parametrize("flat", [True, False])
def test_data_uris_pass(link: str, flat: bool) -> None:
    check_media(body(link, flat=flat), NONE)


@pytest.mark.parametrize(
    "link",
    ["https://images.example/a.png", "http://IMAGES.example:8080/a?b#c", "HTTPS://images.example", "http://10.0.0.7/x"],
)
def test_hosts_the_operator_named_pass(link: str) -> None:
    check_media(body(link), ALLOWED)
    refused(body(link), NONE)


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url", "file_url", "url", "some_new_url"])
def test_every_kind_of_link_counts(kind: str) -> None:
    refused(body("http://127.0.0.1/", kind))
    refused(body("http://127.0.0.1/", kind, flat=True))
    check_media(body("data:,", kind), NONE)


@pytest.mark.parametrize("link", [5, True, ["http://127.0.0.1/"], [{"url": "data:,"}], {"url": "data:,"}])
def test_links_that_are_no_text_are_refused(link: Any) -> None:
    refused(body(link))


@pytest.mark.parametrize(
    "given",
    [
        {}, {"messages": None}, {"messages": "x"}, {"messages": [{}]}, {"messages": [{"content": None}]},
        {"messages": [{"content": "see http://127.0.0.1/"}]}, {"messages": ["x", 1, None]}, {"prompt": "http://x"},
        {"messages": [{"content": ["http://127.0.0.1/", 5, None, {}]}]},
        {"messages": [{"content": [{"type": "text", "text": "http://127.0.0.1/"}]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": None}]}]},
        {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}]},
    ],
)  # fmt: skip
def test_requests_without_links_pass(given: dict[str, Any]) -> None:
    check_media(given, NONE)


def test_the_first_bad_part_is_named_wherever_it_stands() -> None:
    messages = [
        {"content": [{"type": "text", "text": "x"}]},
        {"content": [{"image_url": "data:,"}, {"image_url": "http://x"}]},
    ]
    assert refused({"messages": messages}).param == "messages[1].content[1].image_url"


@given(st.text(max_size=30) | st.builds("http://{}".format, st.text(max_size=20)))
@settings(max_examples=150, deadline=None)
def test_no_text_at_all_passes_without_a_named_host(link: str) -> None:
    if not link.lower().startswith("data:"):
        refused(body(link), NONE)
