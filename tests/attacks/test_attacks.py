"""The attack suite as tests, against one gateway: the last test looks at what the attacks have left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.suite import ATTACKS, Attack, Before
from tests.attacks.target import Tally, Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("attacked"), Tally())
    yield target
    print(f"\n{target.tally.table()}")
    target.close()


@pytest.fixture(scope="module")
def before(target: Target) -> Before:
    return Before(target)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack(target: Target, before: Before, attack: Attack) -> None:
    attack(target)


def test_nothing_is_left_behind(target: Target, before: Before) -> None:
    assert before.look_again(target)
