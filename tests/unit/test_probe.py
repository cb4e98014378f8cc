"""When engines are asked how they are: each on a schedule of its own, over real sockets."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from backends import load
from gateway import probe
from gateway.fleet import LoadTable
from gateway.probe import Prober
from gateway.replica_state import Health
from gateway.types import Endpoint, Replica, Timeouts
from tests.doubles.engine import Engine, Exchange

PATIENCE = 10.0
Test = Callable[[Prober, LoadTable], Awaitable[None]]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as made:
        yield made


def replica(engine: Engine, name: str = "m/a") -> Replica:
    return Replica(name, "m", load("vllm"), Endpoint("127.0.0.1", engine.port), "", "m", Timeouts(), {})


def play(test: Test, *replicas: Replica) -> None:
    """Runs a test beside a prober that looks after these replicas."""

    async def main() -> None:
        fleet = LoadTable()
        fleet.adopt(replicas)
        prober = Prober(fleet)
        running = asyncio.create_task(prober.run())
        try:
            async with asyncio.timeout(60):
                await test(prober, fleet)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await prober.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


async def becomes(check: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not check():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


def health_checks(engine: Engine) -> int:
    return sum(asked.target == "/health" for asked in engine.probes)


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the first look happens by itself."""
    monkeypatch.setattr(probe, "INTERVAL", 1e6)
    monkeypatch.setattr(probe, "RECHECK", 1e6)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "INTERVAL", 0.05)
    monkeypatch.setattr(probe, "RECHECK", 0.01)


@pytest.mark.usefixtures("rarely")
def test_a_reload_asks_those_that_are_new_or_different_and_leaves_the_others_to_their_schedule(engine: Engine) -> None:
    same, changed = replica(engine, "m/same"), replica(engine, "m/changed")

    async def test(prober: Prober, fleet: LoadTable) -> None:
        await becomes(lambda: all(state.health is Health.UP for state in fleet))
        assert health_checks(engine) == 2
        fleet.adopt([replica(engine, "m/same"), replace(changed, api_key="k"), replica(engine, "m/new")])
        prober.wake()
        await becomes(lambda: health_checks(engine) == 4)
        prober.wake()
        await asyncio.sleep(0.1)
        assert health_checks(engine) == 4 and sum("authorization" in dict(p.headers) for p in engine.probes) >= 1

    play(test, same, changed)


@pytest.mark.usefixtures("often")
def test_whoever_is_gone_is_asked_no_more(engine: Engine) -> None:
    async def test(prober: Prober, fleet: LoadTable) -> None:
        await becomes(lambda: health_checks(engine) >= 3)
        fleet.adopt([])
        prober.wake()
        await becomes(lambda: not prober._watched)
        before = len(engine.probes)
        await asyncio.sleep(0.3)
        assert len(engine.probes) <= before + 1  # one may have been on its way

    play(test, replica(engine))


@pytest.mark.usefixtures("rarely")
def test_a_first_good_word_of_one_that_was_down_is_checked_without_waiting_for_the_next_round(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "RECHECK", 0.01)

    async def test(prober: Prober, fleet: LoadTable) -> None:
        (state,) = fleet
        state.health = Health.DOWN
        await becomes(lambda: state.health is Health.UP)
        assert health_checks(engine) == 2

    play(test, replica(engine))


def test_the_first_look_ends_when_it_is_known_who_is_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FIRST_LOOK", 60.0)

    async def test(prober: Prober, fleet: LoadTable) -> None:
        await prober.first_look()
        assert [state.health for state in fleet] == [Health.UP]

    play(test, replica(engine))


def test_an_engine_that_does_not_answer_holds_up_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FIRST_LOOK", 0.05)
    release = threading.Event()
    engine.probe = lambda x: x.wait(release)

    async def test(prober: Prober, fleet: LoadTable) -> None:
        await prober.first_look()
        assert [state.health for state in fleet] == [Health.UNKNOWN]
        release.set()

    play(test, replica(engine))


@pytest.mark.usefixtures("rarely")
def test_only_so_many_are_asked_at_the_same_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "AT_ONCE", 3)
    release, lock, running, most = threading.Event(), threading.Lock(), 0, 0

    def slow(x: Exchange) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if not release.is_set():
            x.wait(release, 5)
        with lock:
            running -= 1
        x.reply(b"" if x.request.target == "/health" else x.dialect.dump(x.dialect.models(x.engine.models)))

    engine.probe = slow

    async def test(prober: Prober, fleet: LoadTable) -> None:
        await becomes(lambda: running == 3)
        await asyncio.sleep(0.1)
        release.set()
        await becomes(lambda: all(state.health is Health.UP for state in fleet))
        assert most == 3

    play(test, *(replica(engine, f"m/{number}") for number in range(12)))


@pytest.mark.usefixtures("often")
def test_an_engine_that_goes_and_comes_back_is_noticed_both_times(engine: Engine) -> None:
    async def test(prober: Prober, fleet: LoadTable) -> None:
        (state,) = fleet
        await becomes(lambda: state.health is Health.UP)
        assert prober.served
        engine.healthy = False
        await becomes(lambda: state.health is Health.DOWN)
        assert state.detail == "status 503" and prober.served
        engine.healthy = True
        await becomes(lambda: state.health is Health.UP)

    play(test, replica(engine))


@pytest.mark.usefixtures("often")
def test_answers_that_make_no_sense_end_nobodys_probing(engine: Engine) -> None:
    def nonsense(x: Exchange) -> None:
        x.reply(b"\xff\x00 nonsense")

    engine.probe = nonsense

    async def test(prober: Prober, fleet: LoadTable) -> None:
        (state,) = fleet
        await becomes(lambda: health_checks(engine) >= 4)
        assert state.card is None and state.load.running is None
        engine.probe, engine.metrics = None, "vllm:num_requests_running 3\n"
        await becomes(lambda: state.load.running == 3)

    play(test, replica(engine))


VLLM_PAGE = b'vllm:num_requests_running 0\nvllm:prefix_cache_hits_total{engine="0"} 30\n'
VLLM_LOOKED_UP = b'vllm:prefix_cache_queries_total{engine="0"} 40\nvllm:prefix_cache_queries_total{engine="1"} 60\n'
RANKS = b'{"loads":[{"num_running_reqs":0,"cache_hit_rate":0.2},{"num_running_reqs":0,"cache_hit_rate":0.4}]}'


@pytest.mark.parametrize(
    ("kind", "page", "hits"),
    [
        ("vllm", VLLM_PAGE + VLLM_LOOKED_UP, 0.3),
        ("vllm", VLLM_PAGE, None),
        ("vllm", b"vllm:prefix_cache_hits_total 0\nvllm:prefix_cache_queries_total 0\n", None),  # nobody has asked yet
        ("vllm", b"vllm:prefix_cache_hits_total 0\nvllm:prefix_cache_queries_total 9\n", 0.0),
        ("vllm", b"vllm:prefix_cache_hits_total 9\nvllm:prefix_cache_queries_total 3\n", None),  # cannot be
        ("sglang", RANKS, 0.3),
        ("sglang", b'{"loads":[{"num_running_reqs":1,"cache_hit_rate":"x"},{"cache_hit_rate":true}]}', None),
        ("tensorrt_llm", b'trtllm_kv_cache_hit_rate{model_name="m"} 0.5\n', 0.5),
        ("tensorrt_llm", b"trtllm_num_requests_running 1\n", None),
        ("llama_server", b"llamacpp:requests_processing 1\n", None),  # it does not publish it
    ],
)
def test_prefix_cache_hits_are_the_engines_own_word_or_unknown(kind: str, page: bytes, hits: float | None) -> None:
    assert load(kind).read_load(page).prefix_hits == (None if hits is None else pytest.approx(hits))
