"""Write down what every case comes to, by the `tcb` that is imported: `python -m
tests.refusals.record`.

Only a refusal that is meant to change is a reason to do so.
"""

import json
from pathlib import Path

from tests.refusals.cases import CASES
from tests.refusals.facts import observe
from tests.refusals.world import World

EXPECTED = Path(__file__).with_name("expected.json")


def main() -> None:
    world = World()
    lines = [
        f"{json.dumps(name)}: {json.dumps(observe(case, world))}" for name, case in CASES.items()
    ]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
