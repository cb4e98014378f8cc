"""What the policies are worth, on virtual engines. The same seed is the same story, to the last figure."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from gateway.routing import POLICIES
from tests.sim import scenarios
from tests.sim.lab import Lab, Result, jain

WARM = 100.0  # seconds that are not measured
SEEDS = (1, 2)
SPREAD = ["least_load", "power_of_two", "round_robin", "prefix_affinity", "session_affinity"]  # all but chance alone


@cache
def chats(policy: str, seed: int) -> Result:
    return scenarios.chats(policy, seed=seed, seconds=250).result(WARM)


@cache
def mixed(policy: str, fast: int, slow: int) -> Lab:
    return scenarios.singles(policy, seconds=220, fast=fast, slow=slow)


# --- shared prefixes
@pytest.mark.parametrize("seed", SEEDS)
def test_chats_start_twice_as_fast_with_prefix_affinity_as_in_rotation(seed: int) -> None:
    """Eight replicas at 80 % of what they can do without warm caches."""
    warm = chats("prefix_affinity", seed)
    assert warm.ttft_mean <= 0.5 * chats("round_robin", seed).ttft_mean
    assert warm.ttft_mean <= 0.8 * chats("power_of_two", seed).ttft_mean


@pytest.mark.parametrize("seed", SEEDS)
def test_prefix_affinity_keeps_the_load_even(seed: int) -> None:
    warm = chats("prefix_affinity", seed)
    assert warm.uneven <= 1.5 and max(warm.busy) <= 1.5 * min(warm.busy)


def test_a_system_prompt_that_all_share_makes_no_replica_hot() -> None:
    warm = scenarios.chats("prefix_affinity", seconds=200, prompts=1).result(WARM)
    assert warm.uneven <= 1.5 and warm.hits > 0.8


def test_prefix_affinity_is_least_load_where_nothing_is_shared() -> None:
    alone = [scenarios.singles(policy, seconds=120).result() for policy in ("prefix_affinity", "least_load")]
    assert alone[0] == alone[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_stay_warm_too(seed: int) -> None:
    warm = chats("session_affinity", seed)
    assert warm.ttft_mean <= 0.5 * chats("round_robin", seed).ttft_mean and warm.uneven <= 1.5


# --- replicas of different speed
@pytest.mark.parametrize(("fast", "slow"), [(3, 1), (2, 2), (1, 3)])
def test_least_load_starts_answers_in_half_the_time_of_rotation_before_mixed_replicas(fast: int, slow: int) -> None:
    """Some are ten times as slow; 80 % of what all can do together."""
    quick, even = mixed("least_load", fast, slow), mixed("round_robin", fast, slow)
    assert quick.result(WARM).ttft_mean <= 0.5 * even.result(WARM).ttft_mean


@pytest.mark.parametrize(("fast", "slow"), [(3, 1), (2, 2), (1, 3)])
def test_least_load_neither_starves_nor_drowns_slow_replicas(fast: int, slow: int) -> None:
    """A slow one gets between a third of and all of what would be a tenth of a fast one's requests, and never has so
    many that they queue inside it."""
    result = mixed("least_load", fast, slow).result(WARM)
    usual = sum(result.served[:fast]) / fast
    assert all(usual / 30 <= served <= usual / 10 * 1.2 for served in result.served[fast:]), result.served
    assert max(result.queued) <= 16 and result.failed == 0, result.queued


def test_least_load_is_no_worse_than_rotation_before_equal_replicas() -> None:
    assert chats("least_load", 1).ttft_mean <= chats("round_robin", 1).ttft_mean
    assert scenarios.sizes("least_load", seconds=150).result(50).ttft_mean <= (
        0.5 * scenarios.sizes("round_robin", seconds=150).result(50).ttft_mean
    )


def test_requests_of_others_are_seen_by_the_engines_own_word() -> None:
    """An engine that has 70 % of its work from elsewhere gets what is left of it."""
    result = scenarios.others("least_load", seconds=200).result(50)
    assert result.served[0] * 3 < min(result.served[1:])
    assert result.ttft_mean <= 0.5 * scenarios.others("round_robin", seconds=200).result(50).ttft_mean


# --- bursts
@pytest.mark.parametrize("policy", SPREAD)
@pytest.mark.parametrize("background", [0.0, 3.0, 9.0])
def test_sixty_requests_within_100_ms_are_spread_evenly_over_three_replicas(policy: str, background: float) -> None:
    """Whatever the last poll, seconds ago, said. Two picked by chance are spread a little less evenly than the rest."""
    for seed in range(6):
        _, went = scenarios.burst(policy, seed, background)
        assert sum(went) == 60
        assert all(abs(count - 20) <= 4 for count in went), (seed, went)


# --- one tenant floods
@pytest.mark.parametrize("seed", SEEDS)
def test_a_tenant_that_asks_for_ten_times_its_share_delays_the_others_by_a_fifth_at_most(seed: int) -> None:
    """Where all four make full use of their shares, compared with the same tenant asking for as much as the others."""
    calm = scenarios.crowd(scenarios.flood(1.1, 1.1, seed=seed))
    loud = scenarios.crowd(scenarios.flood(10, 1.1, seed=seed))
    assert loud.queue_p99 <= 1.2 * calm.queue_p99 and loud.ttft_p99 <= 1.2 * calm.ttft_p99
    assert loud.fairness >= 0.95


def test_a_flood_takes_only_what_the_others_leave() -> None:
    """Tenants that ask for less than their share lose nothing, and wait for a place that another one gives back."""
    lab = scenarios.flood(10, 0.7)
    quiet = [request for request in lab.measured(60, 270) if request.tenant != "loud"]
    assert not any(request.failed for request in quiet)
    assert scenarios.crowd(lab).queue_p99 < 2.0


def test_jains_index_is_one_for_equal_shares_and_one_nth_for_a_monopoly() -> None:
    assert jain([5, 5, 5, 5]) == 1.0 and jain([7, 0, 0, 0]) == 0.25


# --- faults
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replica_that_dies_costs_only_the_answers_it_had_begun(policy: str) -> None:
    """At 200 requests a second. It gets its share again, alone, once it is back."""
    lab = scenarios.death(policy)
    result = lab.result()
    assert result.failed == 0 and 0 < result.cut < 50
    last = [request.replica for request in lab.measured(since=110)]
    assert last.count("m/0") >= 0.25 * len(last)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replica_that_fails_within_a_millisecond_gets_next_to_nothing(policy: str) -> None:
    lab = scenarios.failing(policy)
    requests = lab.measured()
    assert sum("m/0" in request.attempts for request in requests) <= 0.05 * len(requests)
    assert not any(request.failed for request in requests)


# --- the engine itself
def test_the_virtual_engine_is_as_fast_as_its_hardware_says() -> None:
    """Alone on a GPU: 8,000 prompt tokens take about 0.8 s, and a token of the answer about 10 ms."""
    lab = Lab("least_load", [scenarios.GPU])
    lab.source.burst(1.0, 1, 0.0, lambda: lab.source.single("t", 8000, 100))
    lab.run(60)
    (request,) = lab.source.requests
    assert request.first - request.arrived == pytest.approx(request.prompt * 0.0001, rel=0.15)
    assert (request.ended - request.first) / (request.answer - 1) == pytest.approx(0.0103, rel=0.02)


@pytest.mark.parametrize("cache", [6_000, 8_000])
def test_answers_that_outgrow_the_cache_are_put_back_and_finished(cache: int) -> None:
    lab = Lab("least_load", [replace(scenarios.GPU, cache=cache)])
    lab.source.burst(0.0, 30, 1.0, lambda: lab.source.single("t", 300, 600))
    lab.run(600)
    (engine,) = lab.engines
    assert engine.preempted > 0 and lab.result().answered == 30
    assert engine.cache.growing == 0 and engine.cache.free == engine.cache.blocks


def test_the_same_seed_is_the_same_story() -> None:
    again = [scenarios.chats("prefix_affinity", seconds=60).result() for _ in range(2)]
    assert again[0] == again[1] != scenarios.chats("prefix_affinity", seed=2, seconds=60).result()
