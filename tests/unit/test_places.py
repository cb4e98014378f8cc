"""Places that several workers share: never more than the bound as far as they see each other, and nobody starves."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.workers import places
from gateway.workers.places import Columns, Places


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def workers(folder: Path, number: int, clock: Clock) -> list[Places]:
    file = folder / f"places-{number}-{len(list(folder.iterdir()))}"
    places.make(file, number)
    made = [Places(file, index, number, clock) for index in range(number)]
    for one in made:
        one.adopt({"r": 7})
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_each_sees_what_the_others_have_open(tmp_path: Path, clock: Clock) -> None:
    one, two, three = workers(tmp_path, 3, clock)
    one.set_open(7, 2)
    two.set_open(7, 3)
    assert [worker.open_elsewhere(7) for worker in (one, two, three)] == [3, 2, 5]
    assert three.share(7, 8) == 3


def test_a_lone_worker_has_all_places(tmp_path: Path, clock: Clock) -> None:
    (alone,) = workers(tmp_path, 1, clock)
    alone.set_open(7, 3)
    assert alone.share(7, 4) == 4


def test_who_waits_gets_a_share(tmp_path: Path, clock: Clock) -> None:
    one, two = workers(tmp_path, 2, clock)
    one.set_open(7, 4)
    two.set_waiting(7, 1)
    assert (one.share(7, 4), two.share(7, 4)) == (2, 0)  # it takes over what the first one gives up
    one.set_open(7, 2)
    assert two.share(7, 4) == 2
    two.set_waiting(7, 0)
    assert one.share(7, 4) == 4


def test_requests_of_workers_that_do_not_wait_are_left_alone(tmp_path: Path, clock: Clock) -> None:
    one, two, three = workers(tmp_path, 3, clock)
    three.set_open(7, 2)
    for waiting in (one, two):
        waiting.set_waiting(7, 1)
    assert (one.share(7, 4), two.share(7, 4)) == (1, 1)


def test_a_single_place_goes_round(tmp_path: Path, clock: Clock) -> None:
    all_of_them = workers(tmp_path, 3, clock)
    for worker in all_of_them:
        worker.set_waiting(7, 1)
    taken = []
    for clock.now in (0.5, 1.5, 2.5):
        taken += [number for number, worker in enumerate(all_of_them) if worker.share(7, 1) == 1]
    assert sorted(taken) == [0, 1, 2]


def test_a_dead_worker_holds_nothing(tmp_path: Path, clock: Clock) -> None:
    one, two = workers(tmp_path, 2, clock)
    two.set_open(7, 4)
    two.set_waiting(7, 1)
    one.clear(1)
    assert one.share(7, 4) == 4 and not one.wanted_elsewhere(7)


@settings(max_examples=60, deadline=None)
@given(
    bound=st.integers(1, 9), number=st.integers(2, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["come", "go", "second"])), max_size=60),
)  # fmt: skip
def test_never_more_than_the_bound_and_everybody_is_served(
    tmp_path_factory: pytest.TempPathFactory, bound: int, number: int, steps: list[tuple[int, str]]
) -> None:
    """Whatever comes and goes in whatever order: whoever waits has been served once all that runs has ended."""
    clock = Clock()
    all_of_them = workers(tmp_path_factory.mktemp("places"), number, clock)
    opened, waiting = [0] * number, [0] * number

    def take() -> None:
        for index, worker in enumerate(all_of_them):
            while waiting[index] and opened[index] < worker.share(7, bound):
                waiting[index] -= 1
                opened[index] += 1
                worker.set_waiting(7, waiting[index])
                worker.set_open(7, opened[index])
        assert sum(opened) <= bound

    for index, what in steps:
        index %= number
        if what == "come":
            waiting[index] += 1
            all_of_them[index].set_waiting(7, waiting[index])
        elif what == "go" and opened[index]:
            opened[index] -= 1
            all_of_them[index].set_open(7, opened[index])
        elif what == "second":
            clock.now += 1
        take()
    for _ in range(len(steps) * number + number):
        for index, worker in enumerate(all_of_them):
            opened[index] = 0
            worker.set_open(7, 0)
        clock.now += 1
        take()
    assert waiting == [0] * number


def test_columns_stay_over_reloads() -> None:
    columns = Columns()
    first = columns.adopt(["a", "b", "c"])
    second = columns.adopt(["d", "c", "b"])
    assert second["b"] == first["b"] and second["c"] == first["c"]
    assert second["d"] not in first.values()  # requests to `a` may still be running


def test_columns_run_out_quietly() -> None:
    columns = Columns().adopt([str(number) for number in range(places.MOST_REPLICAS + 5)])
    assert len(columns) == len(set(columns.values())) == places.MOST_REPLICAS
