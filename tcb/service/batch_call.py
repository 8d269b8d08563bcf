"""One call for many prompts: submit them to a manager, see all of them through, put the outputs in
order.

It does not know how a manager came to be, or what happens to it afterwards.
"""

import logging
import queue
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tcb.planning.request import GenerationOutput
from tcb.service.manager import ContinuousBatchingManager

logger = logging.getLogger("ContinuousBatchingLogger")

Outputs = dict[str, GenerationOutput]


@dataclass(frozen=True, slots=True)
class BatchCall:
    """The prompts of a call and how they are to be served; each way returns all outputs by id, the
    forks of a request before itself, in the order of the prompts.
    """

    manager: ContinuousBatchingManager
    prompts: list[Any]
    generation_config: Any
    record_timestamps: bool
    progress_bar: bool

    def serve(self, keep: bool) -> Outputs:
        """Run the manager in this thread, from start to stop; `keep` its engine for the next
        call.
        """
        arrived = _Arrivals()
        with self._progress() as arrived.count:
            families = self.manager.serve_here(
                self.prompts, self.generation_config, self.record_timestamps, arrived, keep
            )
        return {name: arrived.outputs[name] for family in families for name in family}

    def wait(self) -> Outputs:
        """Let the manager's running thread serve them."""
        arrived: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        outputs: Outputs = {}
        families = self.manager.collect(
            self.prompts, self.generation_config, self.record_timestamps, arrived
        )
        names = [name for family in families for name in family]
        try:
            with self._progress() as count:
                while len(outputs) < len(names):
                    output = arrived.get()
                    outputs[output.request_id] = output
                    count()
        except BaseException:
            # in a manager that goes on, nobody else would end them
            for name in names:
                self.manager.cancel_request(name)
            raise
        return {name: outputs[name] for name in names}

    @contextmanager
    def _progress(self) -> Generator[Callable[[], object]]:
        """A bar that counts outputs, and what moves it on; none where the log is at DEBUG."""
        if not self.progress_bar or logger.getEffectiveLevel() <= logging.DEBUG:
            yield lambda: None
            return
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        total = len(self.prompts) * (self.generation_config.num_return_sequences or 1)
        with (
            logging_redirect_tqdm([logger]),
            tqdm(total=total, desc=f"Solving {total} requests", unit="request") as bar,
        ):
            yield bar.update


class _Arrivals:
    """Takes outputs as they come, by request id."""

    def __init__(self):
        self.outputs: Outputs = {}
        self.count: Callable[[], object] = lambda: None

    def put(self, output: GenerationOutput) -> None:
        self.outputs[output.request_id] = output
        self.count()
