"""The record of a measurement's units: a line of JSON as each begins and as it ends.

A process that dies leaves its last unit begun and not ended, so the next one goes on behind it.
Neither torch nor Triton is loaded here.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
# a unit gets its seconds and a way to keep a record before its end
Unit = Callable[[float, Callable[[Record], None]], Record]


def read(path: Path) -> list[Record]:
    """The lines recorded so far, without blank ones and those cut off by the end of a process."""
    lines = path.read_text().splitlines() if path.exists() else []
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except ValueError:
            continue
    return whole


def append(path: Path, line: Record) -> None:
    """Record a line of its own, whatever a process left behind at the end of the file."""
    with path.open("a") as file:
        file.write("\n" + json.dumps(line, default=str) + "\n")


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes the units of one part to a file until the time `end`, as of `time.time()`."""

    part: str
    path: Path
    end: float

    def begun(self) -> set[str]:
        """Names of the units that this process or one before it began."""
        lines = [line for line in read(self.path) if line["state"] == "begun"]
        return {line["name"] for line in lines if line["part"] == self.part}

    def begin(self, name: str) -> float:
        """Record that a unit begins; the seconds left for it, 0 if it is out of time."""
        left = max(0.0, self.end - time.time())
        self.write(name, "begun")
        if not left:
            self.write(name, "out of time")
        return left

    def write(self, name: str, state: str, **more: Any) -> None:
        """Record a state of a unit: begun, partial, done, failed or out of time."""
        unit = {"unit": f"{self.part}: {name}", "part": self.part, "name": name}
        append(self.path, {**unit, "state": state, **more})
