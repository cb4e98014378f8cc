"""Forms with files: what is read of them, and what is refused because somebody else would read it differently."""

from __future__ import annotations

import email
import email.policy
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Operation
from gateway.errors import BadRequest
from gateway.formcall import LONGEST_FIELD, FormCall, parse_form
from gateway.media import check_form
from gateway.multipart import LARGEST_HEAD, MOST_PARTS, boundary_of, parts_of

B = b"xYz"
TYPE = b"multipart/form-data; boundary=xYz"


def field(name: str, value: bytes, more: str = "", headers: str = "") -> bytes:
    return b'--xYz\r\nContent-Disposition: form-data; name="%b"%b\r\n%b\r\n%b\r\n' % (
        name.encode(),
        more.encode(),
        headers.encode(),
        value,
    )


FILE = field("file", b"RIFF\0\r\n--xY\r\n", '; filename="a.wav"', "Content-Type: audio/wav\r\n")
MODEL = field("model", b"whisper")
END = b"--xYz--\r\n"


def parse(raw: bytes, content_type: bytes | None = TYPE) -> FormCall:
    return parse_form(Operation.TRANSCRIPTIONS, raw, content_type)


def refused(raw: bytes, content_type: bytes | None = TYPE) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(raw, content_type)
    assert caught.value.status == 400
    return caught.value


# --- content types
@pytest.mark.parametrize(
    ("given", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b"Multipart/Form-Data;boundary=abc", b"abc"),
        (b'multipart/form-data; boundary="a b:c"', b"a b:c"),
        (b"multipart/form-data; charset=utf-8; boundary=a", b"a"),
        (b"multipart/form-data; BOUNDARY=abc ", b"abc"),
        (
            b"multipart/form-data; boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW",
            b"----WebKitFormBoundary7MA4YWxkTrZu0gW",
        ),
    ],
)
def test_boundaries(given: bytes, boundary: bytes) -> None:
    assert boundary_of(given) == boundary


@pytest.mark.parametrize(
    "given",
    [
        None,
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/mixed; boundary=a",
        b"multipart/form-data; boundary=a; Boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 71,
        b'multipart/form-data; boundary="a\\"b"',
        b'multipart/form-data; boundary="a',
        b"multipart/form-data, boundary=a",
        b'multipart/form-data; boundary="ends with a space "',
        b"multipart/form-data; boundary=a; charset=utf-7",
        b"multipart/form-data; boundary*=a",
        b"multipart/form-data; boundary*0=a",
        b"multipart/form-data; boundary=\xff",
        b"multipart/form-data; boundary=a; x=y",
        b"multipart/form-database; boundary=a",
        b'multipart/form-data; boundary="a;"',
    ],
)
def test_what_is_no_form(given: bytes | None) -> None:
    with pytest.raises(BadRequest) as caught:
        boundary_of(given)
    assert caught.value.code == "invalid_content_type"


# --- forms
def test_a_form() -> None:
    raw = FILE + MODEL + field("language", b"en") + field("stream", b"true") + field("empty", b"") + END
    call = parse(raw)
    assert (call.model, call.stream, call.body["language"], call.body["empty"]) == ("whisper", True, "en", "")
    assert "file" not in call.body and call.prompt_tokens == 1000 and call.for_engine("whisper", {}) is raw
    renamed = call.for_engine("openai/whisper-large-v3", {})
    assert renamed == raw.replace(b"\r\nwhisper\r\n", b"\r\nopenai/whisper-large-v3\r\n")
    assert parse(renamed).model == "openai/whisper-large-v3"


def test_the_end_may_come_without_a_new_line() -> None:
    assert parse(FILE + MODEL + END[:-2]).model == "whisper"


@pytest.mark.parametrize(
    "part",
    [
        b"--xYz\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n",
        b'--xYz\r\nContent-Type: text/plain;charset=utf-8\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n',
        b'--xYz\r\nContent-Disposition: Form-Data;name="model"\r\nContent-Length: 1\r\n\r\nm\r\n',
        b'--xYz\r\nContent-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: 8bit\r\n\r\nm\r\n',
    ],
)
def test_the_ways_clients_write_it(part: bytes) -> None:
    assert parse(FILE + part + END).for_engine("n", {}) == FILE + part.replace(b"\r\nm\r\n", b"\r\nn\r\n") + END


def test_file_names_of_all_kinds() -> None:
    for name in (
        '; filename="a \\"b\\".wav"',
        '; filename="日本.wav"',
        "; filename*=UTF-8''a%20b.wav",
        '; filename=""',
    ):
        assert parse(field("file", b"x", name) + MODEL + END).prompt_tokens == 1000


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (FILE + END, "model"),
        (FILE + MODEL + MODEL + END, "model"),
        (FILE + MODEL + field("model", b"other") + END, "model"),
        (FILE + field("model", b"") + END, "model"),
        (FILE + field("model", b"\xff\xfe") + END, "model"),
        (FILE + field("model", b"m" * 1000) + END, "model"),
        (FILE + field("model", b"m", '; filename="m"') + END, "model"),
        (FILE + MODEL + field("model", b"m", '; filename="m"') + END, "model"),
        (FILE + field("model", b"bQ==", "", "Content-Transfer-Encoding: base64\r\n") + END, "model"),
        (MODEL + END, "file"),
        (MODEL + field("file", b"no file") + END, "file"),
    ],
)
def test_exactly_one_model_and_a_file(raw: bytes, param: str) -> None:
    assert refused(raw).param == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x",
        b"--xYz",
        b"--xYz\r\n",
        b"--xYz-x",
        b"\r\n" + FILE + MODEL + END,
        b"preamble\r\n" + FILE + MODEL + END,
        FILE + MODEL,
        FILE + MODEL + b"--xYz",
        FILE + MODEL + b"--xYz-",
        FILE + MODEL + END + b"x",
        FILE + MODEL + END + END,
        (FILE + MODEL + END).replace(b"\r\n", b"\n"),
        FILE + MODEL.replace(b"--xYz", b"--xYz ") + END,
        FILE + MODEL + b"--xYzz\r\n" + END,
        FILE + b"--xYz\r\n\r\nno header\r\n" + MODEL + END,
        FILE + field("x", b'--xYz\r\nContent-Disposition: form-data; name="model"\r\n\r\nm') + MODEL + END,
        FILE + field("x", b"a\n--xYz\nb") + MODEL + END,
        FILE + field("x", b"--xYz") + MODEL + END,
        FILE + field("x", b"a", "", "X" * LARGEST_HEAD + ": 1\r\n") + MODEL + END,
        FILE + field("x", b"a", "", "A: 1\r\nA: 2\r\n") + MODEL + END,
        FILE + field("x", b"a", "", "".join(f"A{n}: 1\r\n" for n in range(20))) + MODEL + END,
        FILE + field("x", b"a", "", "folded:\r\n header\r\n") + MODEL + END,
        FILE + field("x", b"a", "", "A\n: 1\r\n") + END,
        FILE + field("x", b"a", '; name="model"') + MODEL + END,
        FILE + field("x", b"a", "; name*=UTF-8''model") + MODEL + END,
        FILE + field("mo\\del", b"a") + MODEL + END,
        FILE + field('mo\\"del', b"a") + MODEL + END,
        FILE + b"--xYz\r\nContent-Disposition: form-data\r\n\r\nm\r\n" + MODEL + END,
        FILE + b'--xYz\r\nContent-Disposition: attachment; name="x"\r\n\r\nm\r\n' + MODEL + END,
        FILE + b'--xYz\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nm\r\n' + MODEL + END,
        FILE + MODEL + field("x", b"") * MOST_PARTS + END,
        FILE + b'--xYz\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + END,
    ],
)
def test_what_others_might_read_differently_is_refused(raw: bytes) -> None:
    assert refused(raw).code == "invalid_body"


def test_a_large_file_and_large_fields() -> None:
    sound = bytes(range(256)) * 40_000
    raw = field("file", sound, '; filename="a"') + field("prompt", b"p" * (LONGEST_FIELD + 1)) + MODEL + END
    call = parse(raw)
    assert "prompt" not in call.body and sound in call.for_engine("other", {})


def test_json_is_told_what_to_send() -> None:
    assert "multipart/form-data" in refused(b'{"model":"m"}', b"application/json").message


# --- any bytes
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters='"\\'), min_size=1, max_size=10)


def is_taken(name: str) -> bool:
    """Whether it does not look like the name of a field for links."""
    try:
        check_form([name])
    except BadRequest:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(TEXTS.filter(lambda name: name not in ("model", "file") and is_taken(name)), TEXTS, max_size=4),
    st.binary(max_size=200),
    TEXTS,
    TEXTS,
)
def test_forms_of_a_real_client_survive_with_one_value_changed(
    fields: dict[str, str], sound: bytes, model: str, other: str
) -> None:
    request = httpx.Request(
        "POST", "http://x/", data=fields | {"model": model}, files={"file": ("a.wav", sound, "audio/wav")}
    )
    raw, kind = request.read(), request.headers["content-type"].encode()
    call = parse(raw, kind)
    assert call.model == model
    renamed = read_by_another(call.for_engine(other, {}), kind)
    before = read_by_another(raw, kind)
    assert renamed.pop("model") == other.encode() and before.pop("model") == model.encode()
    assert renamed == before and renamed["file"] == sound


def read_by_another(raw: bytes, content_type: bytes) -> dict[str, bytes]:
    """The same form through the standard library's parser of mail."""
    head = b"content-type: %b\r\n\r\n" % content_type
    message: Any = email.message_from_bytes(head + raw, policy=email.policy.HTTP)
    boundary = content_type.partition(b"boundary=")[2]
    found = {}
    for part in raw.split(b"--" + boundary)[1:-1]:
        lines, _, value = part.partition(b"\r\n\r\n")
        name = lines.split(b'name="')[1].split(b'"')[0].decode()
        found[name] = value[:-2]
    assert len(list(message.iter_parts())) == len(found)
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([FILE, MODEL, END, b"\r\n", b"--xYz", b"--", b"x", b'name="model"', b"\n"]), max_size=8)
)
def test_any_bytes_are_a_form_or_a_bad_request(pieces: list[bytes]) -> None:
    raw = b"".join(pieces)
    try:
        call = parse(raw)
    except BadRequest as error:
        assert error.status == 400
    else:
        assert [part.name for part in parts_of(raw, B)].count("model") == 1
        assert parse(call.for_engine("another", {})).model == "another"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(FILE + MODEL + END)), st.binary(max_size=6))
def test_no_change_of_a_form_makes_two_models(place: int, noise: bytes) -> None:
    whole = FILE + MODEL + END
    raw = whole[:place] + noise + whole[place + len(noise) :]
    try:
        call = parse(raw)
    except BadRequest:
        return
    assert call.model.encode() in raw and raw.count(b"--xYz") == len(parts_of(raw, B)) + 1
