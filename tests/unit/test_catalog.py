"""Names, aliases, tags and allow lists."""

from dataclasses import replace

import pytest

from gateway.catalog import find, may_use, resolve, visible
from gateway.errors import ModelNotFound
from gateway.types import Limits, Model, Principal, Tenant


def model(name: str, *aliases: str) -> Model:
    return Model(name, aliases, "least_load", (), (), (), 512, 0)


MODELS = {
    m.name: m
    for m in (
        model("small", "chat"), model("big", "small-and-large"), model("org/model-a"), model("llama3:latest"),
        model("llama3:8b"), model("qwen3:8b"),
    )
}  # fmt: skip
NAMES = {name: m for m in MODELS.values() for name in (m.name, *m.aliases)}


def caller(*models: str, key: tuple[str, ...] | None = None) -> Principal:
    return Principal(Tenant("t"), "k", "user", models, key, Limits())


def refused(asked: str, principal: Principal) -> str:
    with pytest.raises(ModelNotFound) as caught:
        resolve(asked, principal, NAMES)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    return caught.value.message


@pytest.mark.parametrize(
    ("asked", "name"),
    [("small", "small"), ("chat", "small"), ("org/model-a", "org/model-a"), ("llama3", "llama3:latest"),
     ("llama3:8b", "llama3:8b"), ("llama3:latest", "llama3:latest")],
)  # fmt: skip
def test_names(asked: str, name: str) -> None:
    found = find(asked, NAMES)
    assert found is not None
    assert found.name == name
    assert resolve(asked, caller("*"), NAMES) is found


@pytest.mark.parametrize(
    "asked", ["qwen3", "llama3:70b", "SMALL", "small ", " small", "", "small:latest", "*", "sm*", "chat\n"]
)
def test_nothing_but_the_name_itself(asked: str) -> None:
    assert find(asked, NAMES) is None
    refused(asked, caller("*"))


@pytest.mark.parametrize(
    ("tenant", "key", "allowed"),
    [
        (("*",), None, {"small", "big", "org/model-a", "llama3:latest", "llama3:8b", "qwen3:8b"}),
        (("small",), None, {"small"}),
        (("chat",), None, {"small"}),  # by alias
        (("llama3:*",), None, {"llama3:latest", "llama3:8b"}),
        (("small*",), None, {"small"}),  # a glob does not match the alias of another model
        (("SMALL",), None, set()),
        ((), None, set()),
        (("*",), ("small",), {"small"}),
        (("small", "big"), ("big", "qwen3:8b"), {"big"}),
        (("small",), ("*",), {"small"}),
        (("*",), (), set()),
        (("small",), ("big",), set()),
    ],
)
def test_both_allow_lists_have_to_match(
    tenant: tuple[str, ...], key: tuple[str, ...] | None, allowed: set[str]
) -> None:
    principal = caller(*tenant, key=key)
    assert {m.name for m in MODELS.values() if may_use(principal, m)} == allowed
    for asked, m in NAMES.items():
        if m.name in allowed:
            assert resolve(asked, principal, NAMES) is m
        else:
            refused(asked, principal)


def test_hidden_and_unknown_models_sound_the_same() -> None:
    hidden, unknown = refused("big", caller("small")), refused("nope", caller("small"))
    assert hidden.replace("big", "nope") == unknown
    assert "small" not in unknown


def test_an_alias_does_not_open_its_model() -> None:
    """The check is on the model behind the name, not on what was written."""
    refused("small-and-large", caller("small*"))


def test_what_was_resolved_is_remembered_for_this_caller_only() -> None:
    mine, other = caller("*"), caller("small")
    resolve("big", mine, NAMES)
    refused("big", other)
    assert mine.seen.keys() == {"big"}


def test_callers_cannot_make_the_memory_grow() -> None:
    principal = caller("*")
    for i in range(100):
        refused(f"name-{i}", principal)
        refused(f"llama3:{i}", principal)
    resolve("llama3", principal, NAMES)
    assert len(principal.seen) == 0


def test_a_long_name_is_shortened_in_the_message() -> None:
    assert len(refused("x" * 10_000, caller("*"))) < 300


def test_the_list_is_what_the_caller_can_call() -> None:
    for principal in (caller("*"), caller("small", "llama*"), caller("chat"), caller()):
        listed = [name for name, _ in visible(principal, MODELS)]
        assert len(listed) == len(set(listed))
        for name, m in visible(principal, MODELS):
            assert resolve(name, replace(principal, seen={}), NAMES) is m
        for name in NAMES.keys() - set(listed):
            refused(name, principal)
