"""Text assembly: however tokens cut bytes and stop strings, clients see the same text."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backends.llamacpp.text import StopFilter, TextAssembler


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


def assemble(pieces: list[bytes], stops: tuple[str, ...] = ()) -> tuple[str, list[str], bool]:
    assembler = TextAssembler(stops)
    out = [assembler.push(piece) for piece in pieces]
    out.append(assembler.finish())
    return "".join(out), out, assembler.stopped


def expected(text: str, stops: tuple[str, ...]) -> str:
    """Character by character: the first stop string that is complete ends the text where that string began."""
    for end in range(1, len(text) + 1):
        matches = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: min(matches)]
    return text


@given(st.text(), st.lists(st.integers(0, 500)))
def test_any_cut_of_the_bytes_gives_the_same_text(text: str, places: list[int]) -> None:
    assert assemble(cut(text.encode(), places))[0] == text


def test_every_single_cut_inside_multi_byte_characters() -> None:
    text = "naïve 🎭 漢字"
    data = text.encode()
    for at in range(len(data) + 1):
        whole, parts, _ = assemble([data[:at], data[at:]])
        assert whole == text
        assert not any("\ufffd" in part for part in parts)


@given(
    st.text(alphabet="ab🎭", max_size=40),
    st.lists(st.text(alphabet="ab🎭", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 200)),
)
def test_stop_strings_do_not_depend_on_the_cut_and_never_leak(text: str, stops: list[str], places: list[int]) -> None:
    whole, parts, stopped = assemble(cut(text.encode(), places), tuple(stops))
    assert whole == expected(text, tuple(stops))
    assert stopped == (whole != text or any(stop in text for stop in stops))
    assert not any(stop in whole for stop in stops)
    assert all(whole.startswith("".join(parts[:i])) for i in range(len(parts) + 1))


def test_text_that_could_begin_a_stop_string_is_held_until_it_cannot() -> None:
    found = StopFilter(["<end>"])
    assert [found.push("a<e"), found.push("n"), found.push("x"), found.flush()] == ["a", "", "<enx", ""]
    assert [found.push("b<en"), found.flush(), found.stopped] == ["b", "<en", False]


def test_nothing_follows_a_stop_string() -> None:
    found = StopFilter(["##"])
    assert found.push("a##b") == "a"
    assert found.stopped
    assert found.push("c") == "" == found.flush()


def test_a_character_cut_by_the_end_becomes_one_replacement() -> None:
    assert assemble([b"x", "🎭".encode()[:3]])[0] == "x\ufffd"


def test_a_stop_string_completed_by_the_last_flush_still_stops() -> None:
    assert assemble([b"a", b"\xf0"], ("\ufffd",))[0] == "a"
