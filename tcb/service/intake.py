"""Make requests of what users hand in, and submit them: prompts, ids, options, seeds, forks."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from tcb.engine import Engine
from tcb.options.generation import GenerationOptions, read_options
from tcb.options.seeds import draw_base_seed, request_seed
from tcb.planning.config import ContinuousBatchingConfig, check
from tcb.planning.limits import WorkloadHints
from tcb.planning.request import Request
from tcb.service.inbox import Inbox, deadline_of, seconds_to
from tcb.service.loop import Loop
from tcb.service.outputs import OutputRouter, failed_output

logger = logging.getLogger("ContinuousBatchingLogger")

# seconds that a request waits for room in a full queue, as in transformers
QUEUE_TIMEOUT = 10.0
# seconds between two looks at whether the loop that makes room is still there
_LOOK_AGAIN = 0.5
_BESIDE_A_THREAD = (
    "a manager of several ranks runs in the background, so generate_batch cannot join it; stop it "
    "first, or add requests on rank 0"
)


class Intake:
    """The way in: it numbers requests, and holds the options of those that bring none.

    options   generation options of requests to come
    timeout   seconds that a request waits for room in a full queue
    num_ids   ids `req_<n>` given so far; it goes on for life
    """

    def __init__(
        self, router: OutputRouter, inbox: Inbox, loop: Loop, options: GenerationOptions
    ) -> None:
        self._router, self._inbox, self._loop = router, inbox, loop
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._base_seed: int | None = None
        self._num_prompts = 0
        self._warned = False
        self.num_ids = 0
        self.options, self.timeout = options, QUEUE_TIMEOUT

    def use(self, options: GenerationOptions, seed: int | None) -> None:
        """Let requests to come have these options; draws start anew where `seed` is another."""
        self.options, self._warned = options, False
        if seed != self._seed:
            self._seed = seed
            self.reseed()

    def read(self, model: PreTrainedModel, generation_config: Any) -> GenerationOptions:
        """The options that a generation config asks for, with the tokenizer that is in use."""
        return options_of(model, generation_config, self.options.own.tokenizer)

    def reseed(self) -> None:
        """Start the draws anew: the same ones with a seed, other ones without."""
        with self._lock:
            self._base_seed, self._num_prompts = None, 0

    def clear(self) -> None:
        """Take away all that changes logits before a token is chosen."""
        self.options = self.options.without_processing()

    def add(
        self,
        open_engine: Callable[[], Engine],
        tokens: Any,
        options: GenerationOptions,
        request_id: str | None = None,
        **flags: bool,
    ) -> str | None:
        """Submit one prompt and return its id; None if it is dropped, because the run was stopped,
        or left to the rank that takes requests in.

        open_engine   the engine, or RuntimeError if requests are no longer accepted
        flags         `streaming` and `record_timestamps` of the request

        A request that is dropped ends FAILED for who asks for the id that it was given. Raises
        ValueError for what cannot be served, `queue.Full` if there was no room for 10 s, and
        RuntimeError after an error.
        """
        name = self._next_id() if request_id is None else request_id
        try:
            engine = open_engine()
            if not engine.ranks.leads:
                return None
            made = self._make(engine, name, tokens, options, flags)
            self._submit(engine, made, self.timeout)
        except ValueError:
            # serving code registers its handler first, and nothing will ever come for it
            if isinstance(name, str) and not self._router.is_live(name):
                self._router.unregister(name)
            raise
        except RuntimeError as error:
            if self._loop.has_failed:
                raise
            logger.warning("%s; request %s is dropped", error, name)
            if request_id is not None:
                self._refuse(name, tokens, error, options)
            return None
        return name

    def add_all(
        self,
        open_engine: Callable[[], Engine],
        inputs: Iterable[Any],
        options: GenerationOptions,
        awaited: bool = False,
        **flags: bool,
    ) -> list[str]:
        """Submit many prompts and return their ids, in the order of `inputs`.

        awaited  keep the last outputs for who takes them by id, and wait for room in the queue as
                 long as the run goes on
        What cannot be served gets an output in its place, FAILED with the reason, and so does all
        that is dropped because the run was stopped; RuntimeError in place of that if awaited. The
        others are submitted so that equal beginnings meet. Of several ranks one takes requests in;
        the others give the same ids, and wait for the outputs of the same call. Raises RuntimeError
        for such a call beside a thread, which may be done before all ranks wait.
        """
        ids: list[str] = []
        submissions = []
        try:
            engine = open_engine()
        except RuntimeError as error:
            if awaited or self._loop.has_failed:
                raise
            for tokens in inputs:
                ids.append(name := self._next_id())
                self._refuse(name, tokens, error, options)
            logger.warning("%s; %d requests are dropped", error, len(ids))
            return ids
        if awaited and engine.ranks.size > 1 and self._loop.has_thread:
            raise RuntimeError(_BESIDE_A_THREAD)
        for tokens in inputs:
            ids.append(name := self._next_id())
            if not (awaited or engine.ranks.leads):
                continue
            if awaited:
                self._router.expect(output_ids(name, options.num_return_sequences))
            try:
                submissions.append(self._make(engine, name, tokens, options, flags))
            except ValueError as error:
                self._refuse(name, tokens, error, options)
        if engine.config.allow_block_sharing:
            submissions.sort(key=lambda requests: requests[0].prompt, reverse=True)
        for requests in submissions:
            try:
                self._submit(engine, requests, None if awaited else self.timeout)
            except (ValueError, RuntimeError) as error:
                self._refuse(requests[0].id, requests[0].prompt, error, options)
        return ids

    def check_waiting(self, engine: Engine) -> None:
        """End the requests that wait to be taken in and that this engine, built since, cannot
        compute.
        """
        for requests in tuple(self._inbox.requests.queue):
            try:
                first = requests[0]
                reads_history = first.processors is not None
                engine.limits.check_request(len(first.prompt), reads_history)
            except ValueError as error:
                for request in filter(self._router.holds, requests):
                    self._router.fail_and_deliver(request, error)

    def _make(
        self,
        engine: Engine,
        name: str,
        tokens: Any,
        options: GenerationOptions,
        flags: Mapping[str, bool],
    ) -> list[Request]:
        """The request of a prompt, and its forks behind it."""
        ordinal = self._next_ordinal()
        prompt = engine.read_prompt(tokens)
        new_tokens = options.new_tokens_for(len(prompt))
        engine.limits.check_request(len(prompt), options.needs_history)
        self._warn_of_room(name, new_tokens, engine.limits.room_after(len(prompt)))
        now = perf_counter()
        return [
            Request(
                id=name if child == 0 else _fork_id(name, child - 1),
                prompt=prompt,
                max_new_tokens=new_tokens,
                eos=options.eos,
                sampling=options.sampling_for(self._seed_of(ordinal, child), child),
                parent=None if child == 0 else name,
                created_time=now,
                processors=options.processors_for(prompt, new_tokens),
                stop=options.stop_now(),
                **flags,
            )
            for child in range(options.num_return_sequences)
        ]

    def _warn_of_room(self, name: str, new_tokens: int, room: int) -> None:
        """Say once, until other options are used, that a request may end for want of room."""
        if new_tokens > room and not self._warned:
            self._warned = True
            logger.warning(
                "%s: max_new_tokens is %d, and there is room for %d; a request that has not ended "
                "by then is FAILED, with its tokens and the reason",
                name,
                new_tokens,
                room,
            )

    def _submit(self, engine: Engine, requests: Sequence[Request], timeout: float | None) -> None:
        """Open requests and leave them for the loop; where it has no room, wait or turn it."""
        self._router.open(requests)
        if not engine.ranks.leads:
            return
        deadline = deadline_of(timeout)
        # when the run ends meanwhile, so do these
        while self._router.holds(requests[0]):
            left = seconds_to(deadline)
            wait = _LOOK_AGAIN if left is None else min(left, _LOOK_AGAIN)
            is_unattended = self._loop.is_unattended
            try:
                self._inbox.put(requests, 0 if is_unattended else wait)
                return
            except queue.Full:
                if left == 0:
                    self._router.forget(requests)
                    raise
                if is_unattended:
                    self._loop.run_until(lambda: not self._inbox.requests.full(), left)

    def _refuse(self, name: str, tokens: Any, error: Exception, options: GenerationOptions) -> None:
        """Outputs in place of a request, and of its forks, that were never submitted."""
        self._router.deliver_batch(
            failed_output(each, _readable(tokens), str(error))
            for each in output_ids(name, options.num_return_sequences)
        )
        # who turns the loop may wait for nothing else
        self._inbox.wake_up.set()

    def _next_id(self) -> str:
        with self._lock:
            while self._router.is_live(name := f"req_{self.num_ids}"):
                self.num_ids += 1
            self.num_ids += 1
        return name

    def _next_ordinal(self) -> int:
        with self._lock:
            self._num_prompts += 1
            return self._num_prompts - 1

    def _seed_of(self, ordinal: int, child: int) -> int:
        with self._lock:
            if self._base_seed is None:
                self._base_seed = draw_base_seed(self._seed)
            return request_seed(self._base_seed, ordinal, child)


def options_of(
    model: PreTrainedModel, generation_config: Any, tokenizer: Any = None
) -> GenerationOptions:
    """The options that a generation config asks for; those that were read already are left."""
    if isinstance(generation_config, GenerationOptions):
        return generation_config
    return read_options(model, generation_config, {"tokenizer": tokenizer})


def read_settings(config: Any) -> ContinuousBatchingConfig:
    """A checked copy of a configuration of either package."""
    settings = ContinuousBatchingConfig.read(config)
    check(settings)
    return settings


def hints_of(prompts: Iterable[Any], options: GenerationOptions, for_more: bool) -> WorkloadHints:
    """What a call foretells of its requests; with `for_more`, others may follow that differ."""
    lengths = [_length(prompt) for prompt in prompts]
    return WorkloadHints(
        max_prompt_length=max(lengths, default=0),
        max_generated_length=options.max_new_tokens or 0,
        num_requests=0 if for_more else len(lengths) * options.num_return_sequences,
    )


def output_ids(name: str, num_outputs: int) -> list[str]:
    """The ids under which a request's outputs come: its forks', then its own."""
    return [*(_fork_id(name, i) for i in range(num_outputs - 1)), name]


def _fork_id(name: str, number: int) -> str:
    return f"{name}__child#{number}"


def _length(prompt: Any) -> int:
    """Tokens of a prompt; 0 for what is none, which is refused later, alone."""
    try:
        return len(prompt)
    except TypeError:
        return 0


def _readable(tokens: Any) -> list[Any]:
    """What is to be shown of a prompt that was refused."""
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(plain) if isinstance(plain, Iterable) else []
