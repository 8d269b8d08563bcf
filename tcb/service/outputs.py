"""Bring outputs to whoever asked for them: a handler, `wait`, or the queue that all read.

Who waits for an output waits in `loop`; here is what has come, and whether more may.
"""

import asyncio
import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Set
from time import perf_counter
from typing import Any

from tcb.planning.output import GenerationOutput, RequestStatus
from tcb.planning.request import Request
from tcb.planning.state import Sequence

logger = logging.getLogger("ContinuousBatchingLogger")

Handler = Callable[[GenerationOutput], object]
Calls = list[tuple[Handler, GenerationOutput]]


def to_output(sequence: Sequence, error: str | None = None) -> GenerationOutput:
    """What a sequence that has ended answers with; FAILED if it carries an error or ends by one."""
    request, error = sequence.request, sequence.error or error
    return GenerationOutput(
        request_id=request.id,
        prompt_ids=list(request.prompt),
        generated_tokens=sequence.generated.copy(),
        logprobs=list(sequence.logprobs),
        error=error,
        status=RequestStatus.FINISHED if error is None else RequestStatus.FAILED,
        created_time=request.created_time,
        lifespan=(sequence.started, perf_counter()),
        timestamps=list(sequence.timestamps) if request.record_timestamps else None,
    )


def failed_output(
    request_id: str, prompt: Iterable[int], error: str, created_time: float | None = None
) -> GenerationOutput:
    """The output of a request that never ran; created now, unless a time is given."""
    now = perf_counter()
    return GenerationOutput(
        request_id=request_id,
        prompt_ids=list(prompt),
        error=error,
        status=RequestStatus.FAILED,
        created_time=now if created_time is None else created_time,
        lifespan=(-1, now),
    )


class StreamedOutput(GenerationOutput):
    """A request that goes on, as it stands after one more token.

    Its lists are made when they are read: the sequence only ever grows, so its length says enough,
    and an output nobody reads costs nothing that grows with the text.
    """

    _source: tuple[Sequence, int, int]

    @classmethod
    def of(cls, sequence: Sequence) -> "StreamedOutput":
        """The output of a sequence as it stands now."""
        request, output = sequence.request, cls.__new__(cls)
        output._source = sequence, len(sequence.generated), len(sequence.logprobs)
        output.request_id, output.status = request.id, RequestStatus.DECODING
        output.created_time, output.lifespan = request.created_time, (sequence.started, -1)
        if request.record_timestamps:
            output.timestamps = list(sequence.timestamps)
        return output

    def __getattr__(self, name: str) -> Any:
        # called for what `of` has not set; a list that was made is kept like any attribute
        if name not in ("prompt_ids", "generated_tokens", "logprobs"):
            raise AttributeError(name)
        sequence, num_tokens, num_logprobs = self._source
        made: list[Any]
        if name == "prompt_ids":
            made = list(sequence.request.prompt)
        elif name == "generated_tokens":
            made = sequence.generated[:num_tokens]
        else:
            made = sequence.logprobs[:num_logprobs]
        self.__dict__[name] = made
        return made

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationOutput):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return GenerationOutput, tuple(getattr(self, name) for name in _FIELDS)


_FIELDS = tuple(GenerationOutput.__dataclass_fields__)


class OutputQueue:
    """Outputs that nobody has taken yet, oldest first; read like `queue.Queue`, or by id."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._outputs: OrderedDict[int, GenerationOutput] = OrderedDict()
        self._numbers: dict[str, deque[int]] = {}
        self._next_number = 0

    def qsize(self) -> int:
        """How many outputs wait."""
        return len(self._outputs)

    def empty(self) -> bool:
        """Whether none waits."""
        return not self._outputs

    def put(self, output: GenerationOutput) -> None:
        """Add an output and wake who waits."""
        with self._changed:
            self._outputs[self._next_number] = output
            self._numbers.setdefault(output.request_id, deque()).append(self._next_number)
            self._next_number += 1
            self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> GenerationOutput:
        """Take the oldest output; `queue.Empty` if none comes within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._outputs, timeout if block else 0)
            if (output := self.take()) is None:
                raise queue.Empty
            return output

    def get_nowait(self) -> GenerationOutput:
        """Take the oldest output; `queue.Empty` if there is none."""
        return self.get(block=False)

    def take(self, request_id: str | None = None) -> GenerationOutput | None:
        """Take the oldest output, of this request if one is named; None if there is none."""
        with self._changed:
            if request_id is None:
                if not self._outputs:
                    return None
                _, output = self._outputs.popitem(last=False)
                self._forget_oldest(output.request_id)
                return output
            if request_id not in self._numbers:
                return None
            return self._outputs.pop(self._forget_oldest(request_id))

    def _forget_oldest(self, request_id: str) -> int:
        numbers = self._numbers[request_id]
        number = numbers.popleft()
        if not numbers:
            del self._numbers[request_id]
        return number


class OutputRouter:
    """Knows which requests are live and where their outputs go; each gets one last output.

    The last output of an awaited request (`expect`) is kept until it is taken by id; any other
    output goes to the handler of its request, else into `output_queue`. Any thread may call any
    method. `changed` is notified when an output came, when a request ended, and when nothing can
    come any more.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.output_queue = OutputQueue(self.changed)
        self.result_handlers: dict[str, tuple[Handler, asyncio.AbstractEventLoop]] = {}
        self._live: dict[str, Request] = {}
        self._awaited: dict[str, bool] = {}
        self._arrived: dict[str, GenerationOutput] = {}
        self._closed: str | None = None
        self._fed = False

    def open(self, requests: Collection[Request]) -> None:
        """Note that these requests are live from now on, all of them or none.

        Raises ValueError if the id of one is that of a live request, RuntimeError after `close`.
        """
        with self.changed:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            for request in requests:
                if request.id in self._live:
                    raise ValueError(
                        f"request_id is {request.id!r}; accepted: ids of no live request"
                    )
            self._live.update((request.id, request) for request in requests)

    def forget(self, requests: Iterable[Request]) -> None:
        """Take back `open`: the requests were never submitted, and nobody waits for them."""
        with self.changed:
            for request in requests:
                self._live.pop(request.id, None)
            self.changed.notify_all()

    def expect(self, request_ids: Iterable[str]) -> None:
        """Keep the last outputs of these requests, about to be opened, for who takes them by id."""
        with self.changed:
            self._awaited.update(dict.fromkeys(request_ids, True))

    def abandon(self, request_ids: Iterable[str]) -> None:
        """Nobody will take these any more: forget what has come, and what is still to come."""
        with self.changed:
            for request_id in request_ids:
                self._arrived.pop(request_id, None)
                if request_id in self._awaited:
                    self._awaited[request_id] = False

    def ignore(self, request_id: str) -> None:
        """Nobody will take what is still to come of a live request, whoever was to have it."""
        with self.changed:
            self.unregister(request_id)
            if request_id in self._live:
                self._awaited[request_id] = False

    def is_live(self, request_id: str) -> bool:
        """Whether a last output of this id is still to come."""
        return request_id in self._live

    def holds(self, request: Request) -> bool:
        """Whether this very request is live; its id may be that of a later one."""
        return self._live.get(request.id) is request

    def expect_outputs(self) -> None:
        """A loop runs from now on: waiting makes sense, and requests may be opened."""
        with self.changed:
            self._closed, self._fed = None, True

    def close(self, error: str, refusal: str | None) -> None:
        """No loop runs any more: what is live fails with `error`, `open` raises `refusal`, and
        nobody waits.
        """
        with self.changed:
            self._closed, self._fed = refusal, False
            self.deliver_batch([_unrun(request, error) for request in list(self._live.values())])
            self.changed.notify_all()

    def deliver(self, output: GenerationOutput) -> None:
        """Bring one output where it belongs."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: Iterable[GenerationOutput]) -> None:
        """Bring outputs where they belong, in order; every event loop is called once."""
        calls: dict[asyncio.AbstractEventLoop, Calls] = {}
        with self.changed:
            for output in outputs:
                self._route(output, calls)
            for loop, batch in calls.items():
                self._call_soon(loop, batch)

    def fail_and_deliver(self, request: Request, error: Exception | str) -> None:
        """End a request that never ran, with this error."""
        self.deliver(_unrun(request, str(error)))

    def register(self, request_id: str, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        """Call `handler` on `loop` with what is there of this request and with what is to come.

        It is forgotten after the last output of the request, whether that is to come or was there.
        """
        with self.changed:
            batch = []
            while (output := self.take(request_id)) is not None:
                batch.append((handler, output))
            if not (batch and batch[-1][1].is_finished()):
                self.result_handlers[request_id] = (handler, loop)
            if batch:
                self._call_soon(loop, batch)

    def unregister(self, request_id: str) -> None:
        """Forget the handler of an id under which nothing will come."""
        with self.changed:
            self.result_handlers.pop(request_id, None)

    def take(self, request_id: str | None = None) -> GenerationOutput | None:
        """Take the oldest output there is, of this request if one is named; None if there is none.
        Outputs that are awaited are only taken by name.
        """
        with self.changed:
            if request_id is not None and request_id in self._arrived:
                return self._arrived.pop(request_id)
            return self.output_queue.take(request_id)

    def take_arrived(self, request_ids: set[str]) -> list[GenerationOutput]:
        """Take what has come of these awaited requests, whose ids are taken out of the set."""
        with self.changed:
            arrived = [self._arrived.pop(each) for each in request_ids & self._arrived.keys()]
        request_ids.difference_update(output.request_id for output in arrived)
        return arrived

    def may_come(self, request_id: str | None = None) -> bool:
        """Whether an output may still come, of this request if one is named."""
        return self._fed and (request_id is None or request_id in self._live)

    def may_any_come(self, request_ids: Set[str]) -> bool:
        """Whether an output of one of these may still come; the first live request mostly tells."""
        with self.changed:
            return self._fed and not request_ids.isdisjoint(self._live)

    def _route(
        self, output: GenerationOutput, calls: dict[asyncio.AbstractEventLoop, Calls]
    ) -> None:
        request_id, ended = output.request_id, output.is_finished()
        handler = self.result_handlers.get(request_id)
        awaited = self._awaited.get(request_id)
        if ended:
            self._live.pop(request_id, None)
            self._awaited.pop(request_id, None)
            self.result_handlers.pop(request_id, None)
            # who waits for this id has to see its end, wherever that went
            self.changed.notify_all()
        if awaited and ended:
            self._arrived[request_id] = output
        elif awaited is None and handler is not None:
            calls.setdefault(handler[1], []).append((handler[0], output))
        elif awaited is None:
            self.output_queue.put(output)

    def _call_soon(self, loop: asyncio.AbstractEventLoop, batch: Calls) -> None:
        """Hand a batch to its event loop; if that is closed, the outputs are there for all."""
        try:
            loop.call_soon_threadsafe(_call_handlers, batch)
        except RuntimeError:
            logger.warning("an event loop is closed; its outputs are in the queue", exc_info=True)
            for _, output in batch:
                self.result_handlers.pop(output.request_id, None)
                self.output_queue.put(output)


def _unrun(request: Request, error: str) -> GenerationOutput:
    return failed_output(request.id, request.prompt, error, request.created_time)


def _call_handlers(batch: Calls) -> None:
    """Call every handler; one that raises is logged, and the others get theirs."""
    for handler, output in batch:
        try:
            handler(output)
        except Exception:
            logger.exception("the result handler of request %s raised", output.request_id)
