"""Who may answer: what is known to be missing keeps a request away, what is unknown does not, windows are guesses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backends
from backends.base import EngineLoad, ModelCard, Operation
from gateway.call import Call, parse_call
from gateway.errors import ContextTooLong, GatewayError, UnsupportedOperation
from gateway.fit import Kind, fails_alike, fitting, kind_of, refusal
from gateway.fleet import LoadTable
from gateway.types import Endpoint, Model, Replica, Timeouts

TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
ASKS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "tool_choice": {"tools": TOOLS, "tool_choice": "required"},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    "vision": {"messages": PICTURE},
    "logprobs": {"logprobs": True},
    "logit_bias": {"logit_bias": {"5": 1}},
    "n": {"n": 2},
}


def replica(number: int = 0, backend: str = "vllm", **more: Any) -> Replica:
    return Replica(f"m/{number}", "m", backends.load(backend), Endpoint("h", 80), "", "x", Timeouts(), {}, **more)


def card(*capabilities: str, window: int | None = None) -> ModelCard:
    return ModelCard("x", window, capabilities=capabilities)


def chat(words: int = 1, **more: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "four" * words}]} | more
    return parse_call(Operation.CHAT, orjson.dumps(body))


def embed(given: Any) -> Call:
    return parse_call(Operation.EMBEDDINGS, orjson.dumps({"model": "m", "input": given}))


def windows(*given: int | None, backend: str = "vllm") -> list[Kind]:
    return [kind_of(replica(number, backend, context_length=one), None) for number, one in enumerate(given)]


def chosen(kinds: list[Kind], call: Call) -> list[int | None]:
    return [kind.window for kind in fitting(kinds, call)[0]]


# --- capabilities
@pytest.mark.parametrize("name", ASKS)
def test_of_what_nothing_is_known_everything_may_be_asked(name: str) -> None:
    assert refusal(kind_of(replica(), None), chat(**ASKS[name])) is None
    assert refusal(kind_of(replica(), card()), chat(**ASKS[name])) is None


@pytest.mark.parametrize("name", ASKS)
def test_a_list_without_what_another_replicas_list_names_says_that_it_is_missing(name: str) -> None:
    lacking = kind_of(replica(capabilities=("chat",)), None, named={"chat", name})
    error = refusal(lacking, chat(**ASKS[name]))
    assert isinstance(error, UnsupportedOperation) and error.status == 400
    assert error.param == ("tools" if name == "tools" else next(reversed(ASKS[name])))
    assert refusal(lacking, chat()) is None
    able = kind_of(replica(capabilities=("chat", name)), None, named={"chat", name})
    assert refusal(able, chat(**ASKS[name])) is None or name == "tool_choice"


def test_an_operators_list_always_tells_whether_pictures_are_read() -> None:
    assert refusal(kind_of(replica(capabilities=("tools",)), None), chat(messages=PICTURE)) is not None
    assert refusal(kind_of(replica(capabilities=("vision",)), None), chat(messages=PICTURE)) is None


def test_an_operators_list_counts_before_the_engines() -> None:
    says_so = replica(backend="llama_server", capabilities=("vision",))
    assert refusal(kind_of(says_so, card("completion")), chat(messages=PICTURE)) is None


@pytest.mark.parametrize(
    ("backend", "words", "asked", "allowed"),
    [
        ("llama_server", ("completion",), "vision", False),
        ("llama_server", ("completion", "vision"), "vision", True),
        ("llama_server", ("completion",), "tools", True),  # it never tells: a template decides
        ("ollama", ("completion",), "tools", False),
        ("ollama", ("completion", "tools"), "tools", True),
        ("ollama", ("completion", "tools"), "json_schema", True),
        ("lmstudio", ("vision",), "tools", True),
        ("lmstudio", ("tools",), "vision", False),
        ("vllm", ("completion",), "vision", True),  # whoever wrote that list may not know the word
    ],
)
def test_an_engines_list_counts_for_what_that_engine_always_tells(
    backend: str, words: tuple[str, ...], asked: str, allowed: bool
) -> None:
    picture = "data:image/png;base64,AA=="
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]}]}
    request = chat(**(body if asked == "vision" else ASKS[asked]))
    kind = kind_of(replica(backend=backend), card(*words))
    assert (refusal(kind, request) is None) is allowed


def test_the_embedded_engine_is_known_to_be_without_tools_and_pictures() -> None:
    embedded = kind_of(replica(backend="llamacpp"), None)
    for name in ("tools", "vision", "logprobs"):
        assert refusal(embedded, chat(**ASKS[name])) is not None
    for name in ("json_object", "json_schema", "logit_bias", "n"):
        assert refusal(embedded, chat(**ASKS[name])) is None


def test_when_nobody_can_the_refusal_names_the_field_and_what_could_be_asked_for() -> None:
    kinds = [kind_of(replica(1, "llamacpp"), None), kind_of(replica(2, "mlx_lm", capabilities=("chat",)), None)]
    with pytest.raises(UnsupportedOperation) as caught:
        fitting(kinds, chat(messages=PICTURE))
    assert caught.value.param == "messages" and caught.value.status == 400
    assert "vision" not in caught.value.message and "json_schema" in caught.value.message


# --- windows
def test_a_request_that_fits_everywhere_may_go_everywhere() -> None:
    assert chosen(windows(8000, None, 32000), chat(100, max_tokens=1000)) == [8000, None, 32000]


def test_a_long_request_goes_where_it_surely_fits() -> None:
    kinds = windows(8000, None, 32000, 64000)
    assert chosen(kinds, chat(7000, max_tokens=2000)) == [32000, 64000]
    assert chosen(kinds, chat(7000)) == [32000, 64000]  # too near to the edge for a guess
    assert chosen(kinds, chat(100, max_tokens=8000)) == [32000, 64000]  # the answer needs room too


def test_what_might_fit_after_all_is_kept_for_when_the_others_are_away() -> None:
    best, perhaps = fitting(windows(8000, None, 32000), chat(7000))
    assert [kind.window for kind in best] == [32000] and [kind.window for kind in perhaps] == [8000, None]
    best, perhaps = fitting(windows(8000, 32000), chat(9000))
    assert [kind.window for kind in best] == [32000] and not perhaps


def test_what_seems_to_fit_nowhere_goes_to_the_longest_window_and_to_those_unknown() -> None:
    assert chosen(windows(8000, 16000, None), chat(50_000)) == [16000, None]
    assert chosen(windows(8000, 16000), chat(50_000)) == [16000]
    assert chosen(windows(8000, 8000), chat(50_000)) == [8000, 8000]
    assert chosen(windows(None), chat(50_000)) == [None]


def test_an_engine_that_cuts_gets_nothing_that_is_beyond_doubt_too_long() -> None:
    cutting = windows(8000, backend="lmstudio")
    assert chosen(cutting, chat(9000)) == [8000]
    with pytest.raises(ContextTooLong):
        fitting(cutting, chat(11_000))
    assert chosen([*cutting, *windows(4000)], chat(11_000)) == [4000]  # its engine will say so itself


def test_the_engines_own_word_on_its_window_counts_where_the_operator_has_none() -> None:
    assert kind_of(replica(), card(window=4096)).window == 4096
    assert kind_of(replica(context_length=2048), card(window=4096)).window == 2048
    assert kind_of(replica(backend="ollama"), card(window=131072)).window is None  # the longest possible


def test_of_many_inputs_the_longest_decides() -> None:
    kinds = windows(512, 8192)
    assert chosen(kinds, embed(["four" * 100] * 50)) == [512, 8192]
    assert chosen(kinds, embed(["four", "four" * 600])) == [8192]
    assert chosen(kinds, embed([1] * 600)) == [8192] == chosen(kinds, embed([[1], [1] * 600]))
    ranked = {"model": "m", "query": "four" * 300, "documents": ["four" * 300, "four"]}
    assert chosen(kinds, parse_call(Operation.RERANK, orjson.dumps(ranked))) == [8192]


def test_pictures_take_room() -> None:
    assert chosen(windows(1000, 8000), chat(messages=PICTURE)) == [8000]


# --- after an engine has refused
def test_who_would_refuse_as_well() -> None:
    small, large, unknown = windows(8000, 32000, None)
    other = kind_of(replica(backend="sglang", context_length=4000), None)
    long, odd = ContextTooLong("x"), UnsupportedOperation("x")
    assert fails_alike(small, small, long) and fails_alike(other, small, long)
    assert not fails_alike(large, small, long) and not fails_alike(unknown, small, long)
    assert fails_alike(small, small, odd) and not fails_alike(other, small, odd)


# --- all of it
KINDS = st.builds(
    lambda backend, window, words: (backend, window, tuple(sorted(words))),
    st.sampled_from(["vllm", "llama_server", "mlx_lm", "llamacpp", "ollama", "lmstudio"]),
    st.sampled_from([None, 1000, 8000, 32000]),
    st.sets(st.sampled_from(["chat", "tools", "vision", "json_schema"])),
)
REQUESTS = st.builds(
    lambda words, names, most: chat(words, **{k: v for n in names for k, v in ASKS[n].items() if k != "messages"},
                                    **({"max_tokens": most} if most else {})),
    st.sampled_from([1, 500, 900, 7000, 9000, 40_000]),
    st.sets(st.sampled_from(["tools", "json_object", "json_schema", "logprobs", "logit_bias", "n"])),
    st.sampled_from([0, 100, 8000]),
)  # fmt: skip


@given(st.lists(KINDS, min_size=1, max_size=6), REQUESTS)
def test_whoever_is_chosen_can_and_whoever_surely_can_is_chosen(given: list[Any], call: Call) -> None:
    """Held against each replica by itself."""
    replicas = tuple(
        replica(number, backend, context_length=window, capabilities=words)
        for number, (backend, window, words) in enumerate(given)
    )
    named = {word for one in replicas for word in one.capabilities}
    kinds = [kind_of(one, None, named) for one in replicas]
    able = [kind for kind in kinds if refusal(kind, call) is None]
    try:
        best, perhaps = fitting(kinds, call)
    except GatewayError as error:
        assert not able and error.status == 400
        return
    assert best and all(kind in able for kind in best + perhaps)
    assert not any(kind in best for kind in perhaps)
    needed = call.prompt_tokens * 1.25 + (call.max_tokens or 1)
    assert all(kind in best for kind in able if kind.window is not None and kind.window >= needed)
    if any(kind.window is not None and kind.window >= needed for kind in able):
        assert all(kind.window is None or kind.window >= needed for kind in best)


# --- the fleet's groups
def test_replicas_that_answer_alike_are_asked_about_once() -> None:
    fleet = LoadTable()
    replicas = tuple(replica(number, context_length=8000 if number % 2 else 32000) for number in range(64))
    model = Model("m", (), "least_load", (), (), replicas, 512, 0)
    fleet.adopt(replicas)
    groups = fleet.alike(model, Operation.CHAT)
    assert sorted(len(groups.of([kind])) for kind in groups.kinds) == [32, 32]
    assert [state.replica for state in groups.of(groups.kinds[1:])] == [*replicas[1::2]]
    assert fleet.alike(model, Operation.CHAT) is fleet.alike(model, Operation.CHAT)


def test_a_card_that_was_read_counts_from_the_next_look_on() -> None:
    fleet, one = LoadTable(), replica()
    model = Model("m", (), "least_load", (), (), (one,), 512, 0)
    fleet.adopt([one])
    assert fleet.alike(model, Operation.CHAT).kinds[0].window is None
    fleet.of(one).card = card(window=4096)
    fleet.of(one).load_read(EngineLoad(), 1.0)
    fleet.look_over(1.0)
    assert fleet.alike(model, Operation.CHAT).kinds[0].window == 4096
