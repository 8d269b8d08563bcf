"""How outputs leave a manager: by id, in turn, to a handler, to a coroutine; and what it says of
itself.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from tcb.engine import Engine
from tcb.planning.output import GenerationOutput
from tcb.service.loop import Loop
from tcb.service.outputs import OutputRouter


@dataclass(frozen=True, slots=True)
class Stats:
    """How an engine stands; counts are those since it was built, rates those of the latest ten
    seconds or so in which it was busy.

    waiting, running           requests
    steps                      batches launched
    prefill_tokens             positions computed in chunks of prompts
    decode_tokens              positions computed one at a time, a token sampled from each
    prefix_hit_tokens          positions read from shared pages in place of being computed
    preemptions                requests that gave their blocks back before their end
    prefill_tokens_per_second, decode_tokens_per_second
    step_seconds               mean time of a step, host and device together
    busy_seconds, wait_seconds in steps, and in these waiting for the device; the rest is the host's
    num_blocks, held_blocks    of the cache, and how many of them requests hold
    """

    waiting: int = 0
    running: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    wait_seconds: float = 0.0
    num_blocks: int = 0
    held_blocks: int = 0

    @property
    def cache_use(self) -> float:
        """The share of the cache that requests hold, 0 to 1."""
        return self.held_blocks / self.num_blocks if self.num_blocks else 0.0

    @classmethod
    def of(cls, engine: Engine) -> "Stats":
        """How this engine stands; from another thread it may be a step old."""
        meter, pool = engine.meter, engine.state.pool
        prefill, decode, step = meter.rates()
        return cls(
            waiting=len(engine.state.waiting),
            running=len(engine.state.running),
            steps=meter.steps,
            prefill_tokens=meter.prefill_tokens,
            decode_tokens=meter.decode_tokens,
            prefix_hit_tokens=meter.prefix_hit_tokens,
            preemptions=meter.preemptions,
            prefill_tokens_per_second=prefill,
            decode_tokens_per_second=decode,
            step_seconds=step,
            busy_seconds=meter.busy_seconds,
            wait_seconds=meter.wait_seconds,
            num_blocks=pool.num_blocks,
            held_blocks=pool.num_blocks - pool.available,
        )


class Outlet:
    """What a manager hands out, to any thread and to any event loop."""

    output_router: OutputRouter
    _loop: Loop
    add_request: Callable[..., str | None]
    cancel_request: Callable[[str], None]

    def stats(self) -> Stats:
        """How the engine stands now; all zero while there is none."""
        engine = self._loop.engine
        return Stats() if engine is None else Stats.of(engine)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Take the next output, of this request if one is named; others' outputs stay.

        None after `timeout` seconds, and at once if none can come: nothing runs or, without a
        timeout, the named request is not live and its outputs have been taken.
        """
        return self._loop.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come; ends when the run has ended and every output was taken."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Outputs of one request up to its last; none if the request is not live and nothing of it
        is left. Any number of these may run at once.
        """
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], object]
    ) -> None:
        """Let the event loop that runs here call `callback` with the outputs of a request, those
        that came already first; RuntimeError if none runs. A request may be added later.
        """
        self.output_router.register(request_id, callback, asyncio.get_running_loop())

    async def generate(self, input_ids: list[int], **options: Any) -> GenerationOutput:
        """The last output of a prompt, which is submitted as `add_request` does with these options.

        Whoever stops waiting, as `asyncio.wait_for` and a cancelled task do, cancels the request.
        Raises what `add_request` raises, and RuntimeError if the manager does not run.
        """
        async for output in self.stream(input_ids, **{"streaming": False, **options}):
            last = output
        return last

    async def stream(
        self, input_ids: list[int], **options: Any
    ) -> AsyncGenerator[GenerationOutput]:
        """The outputs of a prompt after each token, with all tokens so far; the last one may be
        FAILED. Leaving the loop cancels the request. Raises as `generate`.
        """
        if not self._loop.is_accepting:
            raise RuntimeError("the manager does not run; call start first")
        self._loop.start_thread()
        # it may wait for room in the queue, which must not hold up the event loop
        submitted = asyncio.ensure_future(
            asyncio.to_thread(self.add_request, input_ids, **{"streaming": True, **options})
        )
        request_id: str | None = None
        outputs: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        ended = False
        try:
            request_id = await asyncio.shield(submitted)
            if request_id is None:
                raise RuntimeError("the manager was stopped; the request is dropped")
            self.register_result_handler(request_id, outputs.put_nowait)
            while not ended:
                output = await outputs.get()
                ended = output.is_finished()
                yield output
        finally:
            if not ended:
                submitted.add_done_callback(self._cancel_submitted)

    def _cancel_submitted(self, submitted: "asyncio.Future[str | None]") -> None:
        """Cancel a request that nobody waits for, as soon as it has an id."""
        if submitted.cancelled() or submitted.exception() is not None:
            return
        if (request_id := submitted.result()) is not None:
            self.output_router.ignore(request_id)
            self.cancel_request(request_id)
