"""Issuers' keys over real sockets and files: rotation, failure and recovery, and what is remembered of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway import claims, tokens
from gateway.auth import UnverifiedToken, authenticate
from gateway.config import JwtConfig
from gateway.errors import AuthError
from gateway.people import People, TenantPolicy
from gateway.records import Changes, TenantRecord
from gateway.tokens import Tokens, places, sources
from gateway.tokens.places import NoKeys, Pace, RemotePlace, new_client
from gateway.types import Principal
from tests.doubles.issuer import FAULTS, Issuer, Signer

PATIENCE = 20.0
NEVER = 3600.0
CALM = Pace(asked=NEVER, first_retry=NEVER, last_retry=NEVER)  # nothing happens but what a token asks for
BUSY = Pace(usual=0.05, shortest=0.05, file=0.05, asked=NEVER, first_retry=0.05, last_retry=0.05)
T = TypeVar("T")
Tenants = dict[str, TenantPolicy]


def people(*names: str) -> Tenants:
    return dict(People().with_changes(Changes(1, [TenantRecord(name) for name in names], [])).tenants)


TENANTS = people("t1", "t2")


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(*args, **options)

        asyncio.run(bounded())

    return run


@contextlib.asynccontextmanager
async def listening(*entries: dict[str, Any], pace: Pace = CALM) -> AsyncIterator[Tokens]:
    found = Tokens(pace)
    found.adopt(configured(*entries))
    try:
        yield found
    finally:
        await found.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def configured(*entries: dict[str, Any]) -> tuple[JwtConfig, ...]:
    return tuple(JwtConfig.model_validate(entry) for entry in entries)


async def accepted(found: Tokens, token: str, tenants: Tenants = TENANTS) -> Principal:
    return await found.verify(token.encode(), tenants)


async def refused(found: Tokens, token: str, tenants: Tenants = TENANTS) -> str:
    with pytest.raises(AuthError) as caught:
        await found.verify(token.encode(), tenants)
    return caught.value.reason


async def eventually(check: Callable[[], Awaitable[object] | object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = check()
        if (await value) if isinstance(value, Awaitable) else value:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def works(found: Tokens, token: str) -> bool:
    try:
        return bool(await accepted(found, token))
    except AuthError:
        return False


async def refuses(found: Tokens, token: str) -> bool:
    return not await works(found, token)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer() as one:
        yield one


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The digest of each token whose signature is checked."""
    seen: list[bytes] = []
    real = claims.is_signed

    def counted(token: claims.SignedToken, keys: Any) -> bool:
        seen.append(token.digest)
        return real(token, keys)

    monkeypatch.setattr(claims, "is_signed", counted)
    return seen


# --- nobody to trust
@asynchronous
async def test_without_issuers_there_are_no_tokens_and_no_tasks(issuer: Issuer) -> None:
    async with listening() as found:
        assert found.known is None and len(asyncio.all_tasks()) == 1
        assert await refused(found, issuer.token())
    assert Tokens().known is None


# --- the first token
@asynchronous
async def test_the_first_token_waits_for_the_keys(issuer: Issuer) -> None:
    issuer.fault = "slow"
    async with listening(issuer.entry()) as found:
        asking = asyncio.create_task(accepted(found, issuer.token()))
        await eventually(lambda: issuer.requests)
        assert not asking.done()
        issuer.go_on.set()
        assert (await asking).tenant.name == "t1" and issuer.requests == 1


@asynchronous
async def test_many_first_tokens_share_one_reading(issuer: Issuer) -> None:
    async with listening(issuer.entry()) as found:
        callers = await asyncio.gather(*(accepted(found, issuer.token(sub=f"app-{n}")) for n in range(100)))
        assert {caller.key for caller in callers} == {f"jwt:app-{n}" for n in range(100)}
        assert issuer.requests == 1 and len(found.known or ()) == 100


@asynchronous
async def test_one_token_many_times_at_once_is_verified_once(issuer: Issuer, verifications: list[bytes]) -> None:
    token = issuer.token()
    async with listening(issuer.entry()) as found:
        callers = await asyncio.gather(*(accepted(found, token) for _ in range(50)))
    assert all(caller is callers[0] for caller in callers) and len(verifications) == 1


@asynchronous
async def test_a_caller_who_gives_up_does_not_take_the_keys_from_the_others(issuer: Issuer) -> None:
    issuer.fault = "slow"
    async with listening(issuer.entry()) as found:
        first, second = (asyncio.create_task(accepted(found, issuer.token(sub=sub))) for sub in ("a", "b"))
        await eventually(lambda: issuer.requests)
        first.cancel()
        issuer.go_on.set()
        assert (await second).key == "jwt:b" and issuer.requests == 1
        assert first.cancelled()


@asynchronous
async def test_the_request_says_little_and_asks_for_plain_json(issuer: Issuer) -> None:
    async with listening(issuer.entry()) as found:
        await accepted(found, issuer.token())
    (asked,) = issuer.asked
    assert asked.path == "/keys" and not {"authorization", "cookie"} & asked.headers.keys()
    assert (asked.headers["accept"], asked.headers["accept-encoding"]) == ("application/json", "identity")


# --- what was verified is known
@asynchronous
async def test_a_verified_token_is_found_like_a_key_and_not_verified_again(
    issuer: Issuer, verifications: list[bytes]
) -> None:
    token = issuer.token().encode()
    headers = {b"authorization": b"Bearer " + token}
    async with listening(issuer.entry()) as found:
        with pytest.raises(UnverifiedToken):
            authenticate(headers, {}, found.known, time.time())
        caller = await found.verify(token, TENANTS)
        for _ in range(50):
            assert authenticate(headers, {}, found.known, time.time()) is caller
        assert len(verifications) == 1 and caller.expires is not None
        with pytest.raises(AuthError) as late:
            authenticate(headers, {}, found.known, caller.expires)
        assert "expired" in late.value.reason


@asynchronous
async def test_refused_tokens_are_not_remembered(issuer: Issuer) -> None:
    """A token that is not valid yet becomes valid without anything else happening."""
    async with listening(issuer.entry(leeway=0)) as found:
        token = issuer.token(nbf=time.time() + 0.3)
        assert "not valid yet" in await refused(found, token)
        assert found.known == {}
        await eventually(lambda: works(found, token))


@asynchronous
async def test_the_memory_is_bounded_and_drops_what_has_expired_first(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MOST_KNOWN", 20)
    async with listening(issuer.entry(leeway=0)) as found:
        kept = [await accepted(found, issuer.token(sub=f"kept-{n}")) for n in range(10)]
        soon = time.time() + 0.3
        brief = [await accepted(found, issuer.token(sub=f"brief-{n}", exp=soon)) for n in range(10)]
        await eventually(lambda: time.time() > soon)
        last = await accepted(found, issuer.token(sub="last"))
        known = found.known or {}
        assert set(known) == {one.digest for one in (*kept, last)} and brief[0].digest not in known
        for number in range(100):
            newest = await accepted(found, issuer.token(sub=f"more-{number}"))
            assert newest.digest in known and len(known) <= 20
        assert kept[0].digest not in known


# --- other people, other configurations
@asynchronous
async def test_a_reload_forgets_tokens_and_keeps_keys(issuer: Issuer, verifications: list[bytes]) -> None:
    token = issuer.token()
    async with listening(issuer.entry()) as found:
        await accepted(found, token)
        found.adopt(configured(issuer.entry()))
        assert found.known == {}
        await accepted(found, token)
        assert len(verifications) == 2 and issuer.requests == 1


@asynchronous
async def test_a_reload_has_keys_read_that_are_not_fresh(issuer: Issuer) -> None:
    token = issuer.token()
    async with listening(issuer.entry(), pace=Pace(usual=NEVER, shortest=0.1)) as found:
        await accepted(found, token)
        issuer.published = []
        asked = time.monotonic()
        await eventually(lambda: time.monotonic() > asked + 0.2)
        assert await accepted(found, token) and issuer.requests == 1
        found.adopt(configured(issuer.entry()))
        found.adopt(configured(issuer.entry()))
        await eventually(lambda: issuer.requests == 2)
        await eventually(lambda: refuses(found, token))


@asynchronous
async def test_a_deleted_tenants_tokens_are_nobodys(issuer: Issuer) -> None:
    token = issuer.token()
    async with listening(issuer.entry()) as found:
        await accepted(found, token)
        found.adopt(configured(issuer.entry()))
        assert "tenant" in await refused(found, token, people("t2"))
        assert found.known == {}


@asynchronous
async def test_an_issuer_that_is_taken_out_is_not_trusted_or_asked_any_more(issuer: Issuer) -> None:
    with Issuer() as other:
        async with listening(issuer.entry(), other.entry(), pace=BUSY) as found:
            await accepted(found, issuer.token())
            found.adopt(configured(other.entry()))
            assert "issuer" in await refused(found, issuer.token())
            await accepted(found, other.token())
            asked, others = issuer.requests, other.requests
            await eventually(lambda: other.requests > others + 3)
            assert issuer.requests <= asked + 1  # one may have been under way
            found.adopt(())
            assert found.known is None and await refused(found, other.token())


@asynchronous
async def test_changed_claims_of_the_configuration_count_at_once(issuer: Issuer) -> None:
    token = issuer.token(org="t2")
    async with listening(issuer.entry()) as found:
        assert (await accepted(found, token)).tenant.name == "t1"
        found.adopt(configured(issuer.entry(tenant_claim="org")))
        assert (await accepted(found, token)).tenant.name == "t2"
        found.adopt(configured(issuer.entry(audience="other")))
        assert "audience" in await refused(found, token)


@asynchronous
async def test_what_was_verified_for_people_of_before_is_not_known_afterwards(issuer: Issuer) -> None:
    """The tenant is deleted while its first token waits for the keys: that request goes on, the next one does not."""
    issuer.fault = "slow"
    token = issuer.token()
    async with listening(issuer.entry()) as found:
        asking = asyncio.create_task(accepted(found, token))
        await eventually(lambda: issuer.requests)
        found.adopt(configured(issuer.entry()))
        issuer.go_on.set()
        assert (await asking).tenant.name == "t1"
        assert found.known == {} and await refused(found, token, people("t2"))


# --- several issuers
@asynchronous
async def test_each_issuer_vouches_only_for_its_own_tokens() -> None:
    with Issuer() as one, Issuer("ES256") as two:
        async with listening(one.entry(), two.entry()) as found:
            assert await accepted(found, one.token()) and await accepted(found, two.token())
            assert (one.requests, two.requests) == (1, 1)
            assert await refused(found, two.signers[0].token(one.claims()))
            assert await refused(found, one.signers[0].token(two.claims()))
            assert len(found.known or ()) == 2


@asynchronous
async def test_entries_with_the_same_keys_read_them_once_and_any_of_them_may_accept(issuer: Issuer) -> None:
    entries = issuer.entry(tenant_claim="org"), issuer.entry(audience="other")
    async with listening(*entries) as found:
        assert (await accepted(found, issuer.token(org="t2"))).tenant.name == "t2"
        assert (await accepted(found, issuer.token(aud="other"))).tenant.name == "t1"
        both = issuer.token(aud=["sekisho", "other"])  # the first entry finds no tenant in it
        assert (await accepted(found, both)).tenant.name == "t1"
        assert issuer.requests == 1


# --- new keys
@asynchronous
async def test_a_new_key_works_at_once_and_so_does_the_next(issuer: Issuer) -> None:
    async with listening(issuer.entry()) as found:
        old = issuer.token(sub="old")
        await accepted(found, issuer.token())
        for count in (2, 3, 4):
            issuer.rotate("ES256")
            await accepted(found, issuer.token())
            assert issuer.requests == count
        assert await accepted(found, old) and issuer.requests == 4


@asynchronous
async def test_many_tokens_of_a_new_key_share_one_reading(issuer: Issuer) -> None:
    async with listening(issuer.entry()) as found:
        await accepted(found, issuer.token())
        issuer.rotate()
        await asyncio.gather(*(accepted(found, issuer.token(sub=f"app-{n}")) for n in range(60)))
        assert issuer.requests == 2


@asynchronous
async def test_made_up_key_names_are_no_flood_of_requests(issuer: Issuer) -> None:
    pace = Pace(asked=0.3)
    stranger = Signer("RS256", 7, "x")
    async with listening(issuer.entry(), pace=pace) as found:
        await accepted(found, issuer.token())
        for attempt in range(3):
            forged = [stranger.token(issuer.claims(), kid=f"{attempt}-{n}") for n in range(30)]
            assert all("none of its issuer's keys" in reason
                       for reason in await asyncio.gather(*(refused(found, token) for token in forged)))  # fmt: skip
            assert await refused(found, forged[0])  # the same name again: nothing new to be learnt
        assert issuer.requests == 4
        times = [asked.time for asked in issuer.asked[1:]]
        assert all(later - earlier >= pace.asked * 0.9 for earlier, later in pairwise(times))


@asynchronous
async def test_a_new_key_works_in_spite_of_made_up_names_just_before(issuer: Issuer) -> None:
    async with listening(issuer.entry(), pace=Pace(asked=0.3)) as found:
        assert await refused(found, Signer("RS256", 7, "x").token(issuer.claims()))
        issuer.rotate()
        await accepted(found, issuer.token())
        assert issuer.requests == 3


@asynchronous
async def test_only_so_many_wait_for_a_key_that_may_not_exist(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_WAITING", 3)
    stranger = Signer("RS256", 7, "x")
    async with listening(issuer.entry()) as found:
        await accepted(found, issuer.token())
        issuer.fault = "slow"
        waiting = [asyncio.create_task(refused(found, stranger.token(issuer.claims(), kid=f"x{n}"))) for n in range(3)]
        await eventually(lambda: issuer.requests == 2)
        assert await refused(found, stranger.token(issuer.claims(), kid="one more"))
        assert not any(task.done() for task in waiting)
        assert await accepted(found, issuer.token(sub="b"))  # known keys are not affected
        issuer.go_on.set()
        assert all(await asyncio.gather(*waiting))


@asynchronous
async def test_an_answer_from_before_the_rotation_is_not_the_last_word(issuer: Issuer) -> None:
    async with listening(issuer.entry(), pace=BUSY) as found:
        await accepted(found, issuer.token())
        issuer.fault, before = "slow", issuer.requests
        await eventually(lambda: issuer.requests > before)  # asked in the background, answers with the keys of now
        issuer.rotate()
        issuer.fault = ""
        asking = asyncio.create_task(accepted(found, issuer.token()))
        await asyncio.sleep(0)
        issuer.go_on.set()
        assert (await asking).tenant.name == "t1"


@asynchronous
async def test_an_answer_under_way_that_brings_the_key_is_enough(issuer: Issuer) -> None:
    async with listening(issuer.entry(), pace=Pace(usual=0.2, shortest=0.2, asked=NEVER)) as found:
        await accepted(found, issuer.token())
        issuer.rotate()
        issuer.fault, issuer.cache_control = "slow", f"max-age={NEVER:g}"  # after this one, no more in the background
        await eventually(lambda: issuer.requests == 2)
        asking = asyncio.create_task(accepted(found, issuer.token()))
        await asyncio.sleep(0)
        issuer.go_on.set()
        assert (await asking).tenant.name == "t1" and issuer.requests == 2


@asynchronous
async def test_a_token_without_a_key_name_also_finds_the_new_key(issuer: Issuer) -> None:
    old, new, stranger = (Signer("RS256", number, None) for number in (0, 1, 7))
    issuer.published = [old.jwk()]
    async with listening(issuer.entry(), pace=Pace(asked=0.2)) as found:
        await accepted(found, old.token(issuer.claims()))
        issuer.published = [new.jwk()]
        await accepted(found, new.token(issuer.claims()))
        assert issuer.requests == 2
        assert await refused(found, stranger.token(issuer.claims())) and issuer.requests == 3


@asynchronous
async def test_a_forged_signature_under_a_known_name_is_no_reason_to_ask(issuer: Issuer) -> None:
    async with listening(issuer.entry()) as found:
        await accepted(found, issuer.token())
        forged = Signer("RS256", 7, issuer.signers[0].kid).token(issuer.claims())
        assert "names" in await refused(found, forged) and issuer.requests == 1


@pytest.mark.parametrize(
    "claim", [{"exp": 5}, {"aud": "other"}, {"iat": 1e12}, {"exp": None}, {"iss": "https://x.test"}]
)
@asynchronous
async def test_a_token_that_is_no_good_anyway_is_no_reason_to_ask(issuer: Issuer, claim: dict[str, Any]) -> None:
    async with listening(issuer.entry()) as found:
        await accepted(found, issuer.token())
        issuer.rotate()
        assert await refused(found, issuer.token(**claim)) and issuer.requests == 1


@asynchronous
async def test_new_keys_are_learnt_in_the_background(issuer: Issuer) -> None:
    async with listening(issuer.entry(), pace=BUSY) as found:
        token = issuer.token()
        await accepted(found, token)
        issuer.rotate()
        before = issuer.requests
        await eventually(lambda: issuer.requests > before + 1)
        issuer.fault = "status"  # what comes now was known before the token
        await accepted(found, issuer.token())
        digest = hashlib.sha256(token.encode()).digest()
        assert digest in (found.known or {}), "a key more is no reason to forget"


@pytest.mark.parametrize("how", ["lost", "replaced", "limited"])
@asynchronous
async def test_tokens_are_forgotten_when_a_key_is_lost_or_changed(issuer: Issuer, how: str) -> None:
    token = issuer.token()
    async with listening(issuer.entry(), pace=BUSY) as found:
        await accepted(found, token)
        changed = {
            "lost": [],
            "replaced": [Signer("RS256", 7, "key-0").jwk()],
            "limited": [issuer.signers[0].jwk(alg="RS512")],
        }
        issuer.published = changed[how]
        await eventually(lambda: found.known == {})
        assert await refused(found, token)
        issuer.published = [issuer.signers[0].jwk()]
        await eventually(lambda: works(found, token))


# --- failure
@pytest.mark.parametrize("fault", FAULTS)
@asynchronous
async def test_an_answer_that_is_no_key_set_leaves_the_keys_as_they_were(issuer: Issuer, fault: str) -> None:
    async with listening(issuer.entry(), pace=BUSY) as found:
        token = issuer.token()
        await accepted(found, token)
        issuer.fault, before = fault, issuer.requests
        await eventually(lambda: issuer.requests > before + 2)
        assert found.known, "known tokens stay known"
        await accepted(found, issuer.token(sub="another"))
        issuer.rotate()
        assert await refused(found, issuer.token())
        issuer.fault = ""
        await eventually(lambda: works(found, issuer.token()))
        assert {asked.path for asked in issuer.asked} == {"/keys"}


@pytest.mark.parametrize("fault", FAULTS)
@asynchronous
async def test_without_any_keys_tokens_are_refused_until_the_issuer_answers(issuer: Issuer, fault: str) -> None:
    issuer.fault = fault
    async with listening(issuer.entry(), pace=BUSY) as found:
        assert "cannot be read" in await refused(found, issuer.token())
        issuer.fault = ""
        await eventually(lambda: works(found, issuer.token()))


@asynchronous
async def test_an_issuer_that_is_down_at_first_is_asked_again_for_a_token() -> None:
    issuer = Issuer()
    entry, token = issuer.entry(), issuer.token()
    issuer.stop()
    async with listening(entry, pace=Pace(first_retry=0.05, last_retry=0.05)) as found:
        assert "cannot be read" in await refused(found, token)
        assert found.known == {}


@asynchronous
async def test_the_first_attempt_is_not_repeated_by_those_who_waited_for_it(issuer: Issuer) -> None:
    issuer.fault = "status"
    async with listening(issuer.entry()) as found:
        reasons = await asyncio.gather(*(refused(found, issuer.token(sub=f"app-{n}")) for n in range(10)))
        assert all("cannot be read" in reason for reason in reasons) and issuer.requests == 1


@asynchronous
async def test_without_keys_a_token_has_them_read_although_the_next_attempt_is_far_off(issuer: Issuer) -> None:
    """Back-off may have grown to minutes when the issuer returns."""
    issuer.fault = "status"
    async with listening(issuer.entry(), pace=Pace(first_retry=0.05, last_retry=NEVER, asked=0.05)) as found:
        await eventually(lambda: issuer.requests >= 4)  # 0.05, 0.1, 0.2 s later
        issuer.fault = ""
        await eventually(lambda: works(found, issuer.token()))


@asynchronous
async def test_an_issuer_that_never_answers_is_not_waited_for(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "TIMEOUT", 0.2)
    issuer.fault = "slow"
    async with listening(issuer.entry()) as found:
        assert "cannot be read" in await refused(found, issuer.token())


@asynchronous
async def test_repeated_failures_are_further_and_further_apart(issuer: Issuer) -> None:
    issuer.fault = "status"
    async with listening(issuer.entry(), pace=Pace(first_retry=0.05, last_retry=0.2)):
        await eventually(lambda: issuer.requests == 6)
    gaps = [later.time - earlier.time for earlier, later in pairwise(issuer.asked)]
    assert all(gap >= least * 0.9 for gap, least in zip(gaps, (0.05, 0.1, 0.2, 0.2, 0.2), strict=True)), gaps


@asynchronous
async def test_failure_and_recovery_are_one_line_each(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sekisho")
    token = issuer.token()
    async with listening(issuer.entry(), pace=BUSY) as found:
        await accepted(found, token)
        for _ in range(2):
            issuer.fault, before = "status", issuer.requests
            await eventually(lambda: issuer.requests > before + 3)  # noqa: B023 (called at once)
            issuer.fault, before = "", issuer.requests
            await eventually(lambda: issuer.requests > before + 3)  # noqa: B023
    lines = [record.getMessage() for record in caplog.records if record.name == "sekisho"]
    said = [next(word for word in ("can be used", "cannot", "again") if word in line) for line in lines]
    assert said == ["can be used", "cannot", "again", "cannot", "again"], lines
    assert "answered 500" in lines[1] and issuer.name in lines[1]
    assert not any(part in line for line in lines for part in token.split("."))


@asynchronous
async def test_keys_that_cannot_be_confirmed_for_long_are_not_used_any_more(issuer: Issuer) -> None:
    token = issuer.token()
    pace = Pace(usual=0.05, shortest=0.05, asked=0.05, first_retry=0.05, last_retry=0.05, stale=0.5)
    async with listening(issuer.entry(), pace=pace) as found:
        await accepted(found, token)
        issuer.fault = "status"
        await eventually(lambda: found.known == {})
        assert "cannot be read" in await refused(found, token)
        issuer.fault = ""
        await eventually(lambda: works(found, token))


@asynchronous
async def test_a_mistake_of_our_own_is_a_failure_like_any_other(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(issuer.entry(), pace=BUSY) as found:
        await accepted(found, issuer.token())
        issuer.rotate()
        with monkeypatch.context() as patch:
            patch.setattr(claims, "read_keys", lambda _: 1 / 0)
            await eventually(lambda: "ZeroDivisionError" in caplog.text)
            await accepted(found, issuer.signers[0].token(issuer.claims()))
        await eventually(lambda: works(found, issuer.token()))


# --- for how long keys are kept
@pytest.mark.parametrize(
    ("said", "seconds"),
    [("", 600), ("max-age=120", 120), ("public, max-age=90, must-revalidate", 90), ("MAX-AGE=90", 90),
     ("max-age=5", 60), ("max-age=0", 60), ("max-age=86400", 3600), ("max-age=" + "9" * 40, 600), ("max-age=x", 600),
     ("max-age=-5", 600), ("no-store", 60), ("no-cache, max-age=600", 60), ("s-maxage=90", 600)],
)  # fmt: skip
@asynchronous
async def test_the_issuer_may_say_how_long_within_bounds(issuer: Issuer, said: str, seconds: float) -> None:
    issuer.cache_control = said
    async with new_client() as client:
        document, kept = await RemotePlace(client, issuer.url, Pace()).read()
    assert json.loads(document) == {"keys": issuer.published} and kept == seconds


@asynchronous
async def test_a_set_of_exactly_the_largest_size_is_read(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(json.dumps({"keys": issuer.published}))
    async with new_client() as client:
        place = RemotePlace(client, issuer.url, Pace())
        monkeypatch.setattr(places, "LARGEST_SET", size)
        assert len((await place.read())[0]) == size
        monkeypatch.setattr(places, "LARGEST_SET", size - 1)
        with pytest.raises(NoKeys):
            await place.read()


# --- files
def publish(file: Path, *signers: Signer) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps({"keys": [signer.jwk() for signer in signers]}))
    temporary.replace(file)


def entry_of(file: Path) -> dict[str, Any]:
    return {"issuer": "https://id.test", "audience": "sekisho", "jwks_file": str(file)}


def from_file(signer: Signer) -> str:
    claims = {"iss": "https://id.test", "aud": "sekisho", "exp": time.time() + 60, "tenant": "t1"}
    return signer.token(claims)


@asynchronous
async def test_a_new_key_in_the_file_works_at_once(tmp_path: Path) -> None:
    file, old, new = tmp_path / "keys.json", Signer("RS256", 0, "old"), Signer("ES256", 0, "new")
    publish(file, old)
    async with listening(entry_of(file), pace=Pace(file=NEVER)) as found:
        await accepted(found, from_file(old))
        publish(file, old, new)
        await accepted(found, from_file(new))


@asynchronous
async def test_a_key_that_leaves_the_file_is_forgotten(tmp_path: Path) -> None:
    file, old, new = tmp_path / "keys.json", Signer("RS256", 0, "old"), Signer("ES256", 0, "new")
    publish(file, old)
    async with listening(entry_of(file), pace=BUSY) as found:
        token = from_file(old)
        await accepted(found, token)
        publish(file, new)
        await eventually(lambda: found.known == {})
        assert await refused(found, token)


@pytest.mark.parametrize("how", ["gone", "garbage", "huge", "folder"])
@asynchronous
async def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, signer = tmp_path / "keys.json", Signer("RS256", 0, "old")
    publish(file, signer)
    async with listening(entry_of(file), pace=BUSY) as found:
        await accepted(found, from_file(signer))
        file.unlink()
        if how == "garbage":
            file.write_text('{"keys": [')
        elif how == "huge":
            file.write_text(json.dumps({"keys": [], "padding": "x" * (1 << 21)}))
        elif how == "folder":
            file.mkdir()
        await eventually(lambda: "cannot be read" in caplog.text)
        await accepted(found, from_file(signer))
        if how == "folder":
            file.rmdir()
        publish(file, signer, Signer("ES256", 0, "new"))
        await eventually(lambda: works(found, from_file(Signer("ES256", 0, "new"))))
    assert str(tmp_path) not in caplog.text


@asynchronous
async def test_a_file_that_comes_late_is_found(tmp_path: Path) -> None:
    file, signer = tmp_path / "keys.json", Signer("RS256", 0, "old")
    async with listening(entry_of(file), pace=BUSY) as found:
        assert "cannot be read" in await refused(found, from_file(signer))
        publish(file, signer)
        await eventually(lambda: works(found, from_file(signer)))


# --- the end
@asynchronous
async def test_closing_ends_those_who_wait(issuer: Issuer) -> None:
    issuer.fault = "slow"
    found = Tokens(CALM)
    found.adopt(configured(issuer.entry()))
    asking = asyncio.create_task(refused(found, issuer.token()))
    await eventually(lambda: issuer.requests)
    await found.close()
    assert "cannot be read" in await asking
    assert asyncio.all_tasks() == {asyncio.current_task()}
