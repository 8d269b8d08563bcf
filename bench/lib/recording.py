"""A pytest plugin: record each test as a unit of the measurement, as it begins and as it ends.

`bench.gpu` runs the checks on a device with it, in several processes that take shares of the tests,
and again behind a test that took its process with it. Options: --record FILE, --end TIME and
--share I N.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lib import machine
from bench.lib.records import Recorder, append


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("units of a measurement")
    group.addoption("--record", type=Path, required=True, help="file of JSON lines")
    group.addoption("--end", type=float, required=True, help="time to stop, as of time.time()")
    group.addoption("--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"))


def pytest_configure(config: pytest.Config) -> None:
    """Begin the record with the facts of the machine. Full checks need an accelerator."""
    full = config.option.markexpr == "gpu"
    device = machine.current_device() if full else torch.device("cpu")
    if full and device.type == "cpu":
        raise pytest.UsageError("no accelerator: --reduced runs on a CPU")
    append(config.option.record, machine.facts_line(device))
    config.pluginmanager.register(_Units(config.option, device))


class _Units:
    """Keeps the tests of a share that are not begun yet, and records what becomes of each."""

    def __init__(self, options: Any, device: torch.device) -> None:
        self.recorder = Recorder("checks", options.record, options.end)
        self.share, self.device = options.share, device
        self.reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        first, step = self.share
        begun = self.recorder.begun()
        items[:] = [item for item in items[first::step] if _name(item.nodeid) not in begun]

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Record that a test begins; one that is out of time does not run."""
        self.reports = []
        return None if self.recorder.begin(_name(item.nodeid)) else True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test behind its last phase. Leave the process if the device is broken."""
        self.reports.append(report)
        if report.when != "teardown":
            return
        seconds = round(sum(phase.duration for phase in self.reports), 2)
        state, more = _outcome(self.reports)
        self.recorder.write(_name(report.nodeid), state, seconds=seconds, **more)
        if state == "failed" and machine.is_broken(self.device):
            pytest.exit("the device answers no more", returncode=machine.BROKEN)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """Exit with 0 where every test has its record, also where some failed or none was left."""
        yield
        codes = pytest.ExitCode
        if session.exitstatus in (codes.TESTS_FAILED, codes.NO_TESTS_COLLECTED):
            session.exitstatus = codes.OK


def _name(nodeid: str) -> str:
    return nodeid.removeprefix("tests/gpu/").removeprefix("test_")


def _outcome(reports: list[pytest.TestReport]) -> tuple[str, dict[str, Any]]:
    """State of a test and what is kept with it: its figures, or why it failed or did not run."""
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            error = crash.message if crash else report.longreprtext
            return "failed", {"error": error[:2000], "traceback": report.longreprtext[-1500:]}
        if report.skipped:
            _, _, reason = report.longrepr
            return "done", {"record": {"skipped": reason.removeprefix("Skipped: ")}}
    return "done", {"record": dict(reports[-1].user_properties)}
