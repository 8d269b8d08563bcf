"""Makes requests of what users hand in, and submits them: prompts, ids, options, seeds, forks.

It does not know threads, or what an engine does beyond saying which requests can run.
"""

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from time import monotonic, perf_counter
from typing import Any

from tcb.engine import Engine
from tcb.options.generation import GenerationOptions
from tcb.options.seeds import draw_base_seed, request_seed
from tcb.planning.request import Request, check_prompt, end_tokens
from tcb.service.loop import Inbox
from tcb.service.outputs import Collector, OutputRouter, failed_output

# seconds between two looks at whether the loop that makes room is still there
_LOOK_AGAIN = 0.5


@dataclass(frozen=True, slots=True)
class Wish:
    """What one call asks for, the same for all its prompts.

    eos              ids that end a generation; None: those of the options
    max_new_tokens   None: what the options make of the prompt's length
    num_outputs      outputs per prompt: the request itself and its forks
    """

    options: GenerationOptions
    eos: frozenset[int] | None
    max_new_tokens: int | None
    num_outputs: int
    streaming: bool
    record_timestamps: bool


class Intake:
    """The way in: it numbers requests, and holds the options of those that bring none.

    options                 what the generation config asks for
    num_return_sequences    outputs per prompt: the request itself and its forks
    num_ids                 ids `req_<n>` given so far; it goes on for life
    """

    def __init__(self, router: OutputRouter, inbox: Inbox):
        self._router, self._inbox = router, inbox
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._base_seed: int | None = None
        self._num_prompts = 0
        self.num_ids = 0
        self.num_return_sequences = 1
        self.options: GenerationOptions | None = None

    def use(self, options: GenerationOptions, seed: int | None) -> None:
        """Let requests to come have these options; draws start anew where `seed` is another."""
        with self._lock:
            self.options, self.num_return_sequences = options, options.num_return_sequences
        if seed != self._seed:
            self._seed = seed
            self.reseed()

    def reseed(self) -> None:
        """Start the draws anew: the same ones with a seed, other ones without."""
        with self._lock:
            self._base_seed, self._num_prompts = None, 0

    def clear(self) -> None:
        """Take away all that changes logits before a token is chosen."""
        self.options = self.options.without_processing()

    def read_wish(
        self, streaming: bool, record_timestamps: bool, options: Mapping[str, Any]
    ) -> Wish:
        """What the keywords of a call ask for; None leaves what the manager has.

        Raises ValueError for a value out of range and TypeError for an unknown keyword.
        """
        options = dict(options)
        eos, most = options.pop("eos_token_id", None), options.pop("max_new_tokens", None)
        return Wish(
            options=self.options.override(**options) if options else self.options,
            eos=None if eos is None else end_tokens(eos),
            max_new_tokens=None if most is None else _positive("max_new_tokens", most),
            num_outputs=self.num_return_sequences,
            streaming=bool(streaming),
            record_timestamps=bool(record_timestamps),
        )

    def add(
        self, engine: Engine, tokens: Any, request_id: str | None, wish: Wish, timeout: float
    ) -> str:
        """Submit one prompt and return its id; wait `timeout` seconds for room in the queue.

        Raises ValueError for what cannot be served, `queue.Full`, and RuntimeError after the end.
        """
        name = self._next_id() if request_id is None else request_id
        try:
            requests = self._make(engine, name, tokens, self._next_ordinal(), wish)
            self._submit(requests, None, timeout)
        except ValueError:
            # serving code registers its handler first, and nothing will ever come for it
            if isinstance(name, str) and not self._router.is_live(name):
                self._router.unregister(name)
            raise
        return name

    def add_all(
        self,
        engine: Engine,
        inputs: Iterable[Any],
        wish: Wish,
        collector: Collector | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """Submit many prompts and return their ids, in the order of `inputs`.

        What cannot be served gets an output in its place, FAILED with the reason. The others are
        submitted so that equal beginnings meet. Last outputs go to `collector` if there is one.
        Without `timeout` it waits for room in the queue as long as the loop runs.
        """
        ids, submissions = [], []
        for tokens in inputs:
            name, ordinal = self._next_id(), self._next_ordinal()
            ids.append(name)
            try:
                submissions.append(self._make(engine, name, tokens, ordinal, wish))
            except ValueError as error:
                self._refuse(name, tokens, error, wish.num_outputs, collector)
        if engine.limits.share_prefixes:
            submissions.sort(key=lambda requests: requests[0].prompt, reverse=True)
        for requests in submissions:
            try:
                self._submit(requests, collector, timeout)
            except (ValueError, RuntimeError) as error:
                first = requests[0]
                self._refuse(first.id, first.prompt, error, wish.num_outputs, collector)
        return ids

    def _make(self, engine, name, tokens, ordinal, wish):
        """The request of a prompt, and its forks behind it."""
        options = wish.options
        prompt = check_prompt(tokens, engine.layers.num_embeddings)
        new_tokens = wish.max_new_tokens or options.new_tokens_for(len(prompt))
        engine.check(len(prompt), new_tokens)
        eos = options.eos if wish.eos is None else wish.eos
        now = perf_counter()
        return [
            Request(
                id=name if child == 0 else _fork_id(name, child - 1),
                prompt=prompt,
                max_new_tokens=new_tokens,
                eos=eos,
                sampling=options.sampling_for(self._seed_of(ordinal, child), child),
                parent=None if child == 0 else name,
                streaming=wish.streaming,
                record_timestamps=wish.record_timestamps,
                created_time=now,
                processors=options.processors_for(prompt, new_tokens, eos),
            )
            for child in range(wish.num_outputs)
        ]

    def _submit(
        self,
        requests: Sequence[Request],
        collector: Collector | None,
        timeout: float | None,
    ) -> None:
        self._router.open(requests, collector)
        deadline = None if timeout is None else monotonic() + timeout
        # when the loop ends meanwhile, so do these
        while self._router.holds(requests[0]):
            left = _LOOK_AGAIN if deadline is None else deadline - monotonic()
            try:
                self._inbox.put(requests, min(max(left, 0), _LOOK_AGAIN))
                return
            except queue.Full:
                if left <= 0:
                    self._router.forget(requests)
                    raise

    def _refuse(self, name, tokens, error, num_outputs, collector):
        """Outputs in place of a request, and of its forks, that were never submitted."""
        for each in output_ids(name, num_outputs):
            output = failed_output(each, _readable(tokens), str(error))
            if collector is None:
                self._router.deliver(output)
            else:
                collector.put(output)

    def _next_id(self):
        with self._lock:
            while self._router.is_live(name := f"req_{self.num_ids}"):
                self.num_ids += 1
            self.num_ids += 1
        return name

    def _next_ordinal(self):
        with self._lock:
            self._num_prompts += 1
            return self._num_prompts - 1

    def _seed_of(self, ordinal, child):
        with self._lock:
            if self._base_seed is None:
                self._base_seed = draw_base_seed(self._seed)
            return request_seed(self._base_seed, ordinal, child)


def plain_wish(options: GenerationOptions, record_timestamps: bool) -> Wish:
    """What options of their own ask for."""
    outputs = options.num_return_sequences
    return Wish(options, None, None, outputs, False, bool(record_timestamps))


def output_ids(name: str, num_outputs: int) -> list[str]:
    """The ids under which a request's outputs come: its forks', then its own."""
    return [*(_fork_id(name, i) for i in range(num_outputs - 1)), name]


def _fork_id(name, number):
    return f"{name}__child#{number}"


def _positive(field, value):
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise ValueError(f"{field} is {value!r}; accepted: integers >= 1")
    return number


def _readable(tokens):
    """What is to be shown of a prompt that was refused."""
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return list(plain) if isinstance(plain, Iterable) else []
