"""`python -m tests.attacks`: every attack against a gateway of its own, and a table of how they ended."""

import sys
import tempfile
import traceback
from pathlib import Path

from tests.attacks.suite import ATTACKS, Before
from tests.attacks.target import Tally, Target


def main() -> int:
    failed, tally = 0, Tally()
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder), tally)
        try:
            before = Before(target)
            for attack in ATTACKS:
                try:
                    attack(target)
                except Exception:  # the others are worth seeing
                    failed += 1
                    print(f"--- {attack.__name__} got through", file=sys.stderr)
                    traceback.print_exc(limit=3)
            left = before.look_again(target)
        finally:
            target.close()
    print(tally.table())
    print("\n" + "\n".join(f"{what}: {value}" for what, value in left.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
