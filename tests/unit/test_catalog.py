"""Names, aliases, tags, allow lists, and replicas that are dedicated to a tenant."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backends
from gateway import errors
from gateway.catalog import find, lookup, resolve, variant_note, variants, visible
from gateway.errors import ModelNotFound, VariantNotFound
from gateway.types import Endpoint, Limits, Model, Principal, Replica, Tenant, Timeouts


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
    assert {m.name for m in MODELS.values() if lookup(m.name, principal, MODELS) is m} == allowed
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
    first = resolve("big", mine, NAMES)
    refused("big", other)
    assert mine.seen.keys() == {"big"} and resolve("big", mine, NAMES) is first


def test_callers_cannot_make_the_memory_grow() -> None:
    principal = caller("*")
    for i in range(100):
        refused(f"name-{i}", principal)
        refused(f"llama3:{i}", principal)
    resolve("llama3", principal, NAMES)
    assert len(principal.seen) == 0


def test_looking_at_the_list_is_not_remembered() -> None:
    """Thousands of callers look at it, and each would keep every model there is."""
    principal = caller("*")
    assert list(visible(principal, MODELS))
    assert not principal.seen


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


# --- replicas of one's own
def engine(name: str, tenant: str | None = None, kind: str = "vllm", **more: Any) -> Replica:
    return Replica(
        name, "m", backends.load(kind), Endpoint(name, 80), "", "e", Timeouts(), {}, tenant=tenant, **more
    )


def served(name: str, *replicas: Replica, aliases: tuple[str, ...] = (), **more: Any) -> Model:
    return replace(model(name, *aliases), replicas=replicas, **more)


def of(tenant: str, *models: str) -> Principal:
    return Principal(Tenant(tenant), "k", "user", models or ("*",), None, Limits())


def ids(found: Model | None) -> list[str]:
    assert found is not None
    return [replica.id for replica in found.replicas]


SHARED, ACME, OTHER = engine("shared"), engine("acme", "acme"), engine("other", "other")
FLEET = {
    m.name: m
    for m in (
        served("mixed", SHARED, ACME, OTHER, aliases=("blend",)), served("closed:latest", OTHER, aliases=("shut",)),
        served("open", SHARED, fallbacks=("closed", "mixed")),
    )
}  # fmt: skip
FLEET_NAMES = {name: m for m in FLEET.values() for name in (m.name, *m.aliases)}


@pytest.mark.parametrize(("tenant", "gets"), [("acme", "acme"), ("other", "other"), ("third", "shared")])
@pytest.mark.parametrize("asked", ["mixed", "blend", "mixed@vllm"])
def test_a_tenant_with_replicas_of_its_own_gets_those_and_others_none_of_them(
    tenant: str, gets: str, asked: str
) -> None:
    assert ids(resolve(asked, of(tenant), FLEET_NAMES)) == [gets]


@given(
    st.lists(st.sampled_from([None, "acme", "other", "third"]), min_size=1, max_size=5),
    st.sampled_from(["acme", "other", "nobody"]),
)
def test_wherever_the_dedicated_ones_stand(labels: list[str | None], tenant: str) -> None:
    replicas = [engine(f"r{number}", label) for number, label in enumerate(labels)]
    own = [replica.id for replica in replicas if replica.tenant == tenant]
    shared = [replica.id for replica in replicas if replica.tenant is None]
    found = lookup("m", of(tenant), {"m": served("m", *replicas)})
    assert (ids(found) if found else []) == (own or shared)


def test_a_model_of_others_does_not_exist() -> None:
    for asked in ("closed", "closed:latest", "shut", "closed@vllm", "shut@vllm", "closed@other"):
        hidden, unknown = (answer(name, of("acme")) for name in (asked, asked.replace("closed", "nobody")))
        assert hidden.replace(asked.encode(), b"?") == unknown.replace(
            asked.replace("closed", "nobody").encode(), b"?"
        ), asked
    assert ids(resolve("shut", of("other"), FLEET_NAMES)) == ["other"]


def answer(asked: str, principal: Principal) -> bytes:
    with pytest.raises(ModelNotFound) as caught:
        resolve(asked, principal, FLEET_NAMES)
    return errors.body(caught.value)


def test_the_list_has_what_is_left_for_the_caller() -> None:
    most = ["mixed", "blend", "open"]
    for tenant, names in (("acme", most), ("other", [*FLEET_NAMES]), ("third", most)):
        principal = of(tenant)
        assert [name for name, _ in visible(principal, FLEET)] == names
        for name, m in visible(principal, FLEET):
            assert {replica.tenant for replica in m.replicas} <= {tenant, None}
            assert resolve(name, principal, FLEET_NAMES) is m


def test_fallbacks_are_the_callers_own_too() -> None:
    def chain(tenant: str) -> list[list[str] | None]:
        principal = of(tenant)
        found = [lookup(name, principal, FLEET_NAMES) for name in resolve("open", principal, FLEET_NAMES).fallbacks]
        return [ids(m) if m else None for m in found]

    assert chain("acme") == [None, ["acme"]] and chain("other") == [["other"], ["other"]]


def test_every_way_to_a_model_leads_to_the_same_view() -> None:
    """What a request compares by identity, and what costs nothing after the first time."""
    principal = of("other")
    view = resolve("blend", principal, FLEET_NAMES)
    assert view is resolve("mixed", principal, FLEET_NAMES) is lookup("mixed", principal, FLEET_NAMES)
    assert resolve("closed", principal, FLEET_NAMES) is resolve("shut", principal, FLEET_NAMES)
    assert principal.seen.keys() == {"blend", "mixed", "shut"}  # `closed` is no configured name, `closed:latest` is
    assert resolve("open", principal, FLEET_NAMES) is FLEET["open"]  # whole: nothing was cut away


VARIED = {
    "m": served(
        "m", engine("a", format="safetensors", context_length=4096, capabilities=("tools",)),
        engine("b", "acme", kind="llama_server", format="gguf", quantization="Q4_K_M", context_length=131072,
               capabilities=("tools", "vision")),
        context_length=131072, capabilities=("tools", "vision"),
    )
}  # fmt: skip


def test_a_variant_that_only_others_have_is_not_listed() -> None:
    assert variants(resolve("m", of("third"), VARIED)) == ["safetensors", "vllm"]
    assert variants(resolve("m", of("acme"), VARIED)) == ["gguf", "q4_k_m", "llama_server"]
    with pytest.raises(VariantNotFound) as hidden:
        resolve("m@gguf", of("third"), VARIED)
    with pytest.raises(VariantNotFound) as unknown:
        resolve("m@mlx", of("third"), VARIED)
    assert hidden.value.message.replace("gguf", "mlx") == unknown.value.message
    assert "llama_server" not in hidden.value.message
    with pytest.raises(VariantNotFound):
        resolve("m@vllm", of("acme"), VARIED)


def test_windows_and_capabilities_of_others_are_not_shown() -> None:
    third, acme = resolve("m", of("third"), VARIED), resolve("m", of("acme"), VARIED)
    assert (third.context_length, third.capabilities) == (4096, ("tools",))
    assert (acme.context_length, acme.capabilities) == (131072, ("tools", "vision"))
    written = {"m": replace(VARIED["m"], context_length=2048, capabilities=("chat",))}  # by the operator, for all
    assert resolve("m", of("third"), written).context_length == 2048
    assert resolve("m", of("third"), written).capabilities == ("chat",)


def test_the_note_on_variants_names_the_callers_own() -> None:
    principal = of("third")
    assert variant_note(resolve("m", principal, VARIED), principal, VARIED) == ""
    note = variant_note(resolve("m@vllm", principal, VARIED), principal, VARIED)
    assert "safetensors, vllm" in note and "gguf" not in note


# --- time
def steps(act: Callable[[], object]) -> int:
    """Calls of Python and C functions."""
    count = 0

    def profile(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def refusal_steps(asked: str, principal: Principal, names: dict[str, Model]) -> int:
    def ask() -> None:
        try:
            resolve(asked, principal, names)
        except ModelNotFound as error:
            errors.body(error)
        else:
            raise AssertionError(asked)

    ask()  # patterns are compiled once
    return min(steps(ask) for _ in range(5))  # the collector may come in between, with steps of its own


CALLERS: Sequence[Principal] = (
    of("acme"), of("acme", "mixed", "open"), of("acme", "z*", "mixed"), of("third", "nothing"),
    replace(of("acme"), key_models=("mixed", "o*")), replace(of("acme", "none"), key_models=("mixed",)),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLERS)))
@pytest.mark.parametrize("name", ["closed", "shut", "closed:latest", "closed@vllm", "shut@other", "a@closed"])
def test_a_hidden_name_takes_the_steps_of_an_unknown_one(number: int, name: str) -> None:
    """Counted, since a clock would show nothing: the same calls, whether the name is there or not."""
    principal, empty = CALLERS[number], dict[str, Model]()
    assert refusal_steps(name, principal, FLEET_NAMES) == refusal_steps(name, principal, empty)
    for hidden_by_list in ("mixed", "blend", "open"):
        if lookup(hidden_by_list, principal, FLEET_NAMES) is None:
            known = refusal_steps(hidden_by_list, principal, FLEET_NAMES)
            assert known == refusal_steps(hidden_by_list, principal, empty)
