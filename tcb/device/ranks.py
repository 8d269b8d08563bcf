"""Keeps the ranks of a tensor-parallel model in step.

Every rank plans for itself: planning is deterministic, so equal arrivals give equal plans. What is
not a function of the arrivals comes from rank 0 (requests, cancellations, tokens, decisions of a
request's own code) or is agreed on (sizes, the wish to stop or to pause). A process that is alone
asks nobody.
"""

import platform
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, distributed

from tcb.model.parallel import TensorParallel
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.limits import Facts
from tcb.planning.request import Request

# seconds between two looks at whether a batch on a device is done
_LOOK_AGAIN = 5e-5
# settings that ranks need not have in common: only rank 0's have a say
_OF_RANK_0 = ("seed", "max_queue_size", "per_request_processors")

T = TypeVar("T")


class Ranks:
    """The group of one engine. All of its ranks call the same methods in the same order.

    rank, size   0 and 1 in a process that is alone

    A rank that dies, or does not come within `timeout` seconds (None: torch's default), raises
    RuntimeError in all others; the group is of no use after that.
    """

    def __init__(self, parallel: TensorParallel | None, timeout: float | None) -> None:
        self.rank, self.size, self._timeout = 0, 1, timeout
        self._parallel, self._group, self._root = parallel, None, 0
        self._restore: tuple[Any, timedelta] | None = None
        if parallel is None:
            return
        self.rank, self.size = parallel.rank, parallel.size
        members = distributed.get_process_group_ranks(parallel.group)
        limit = None if timeout is None else timedelta(seconds=timeout)
        self._root = members[0]
        self._group = distributed.new_group(
            members,
            timeout=limit,
            backend="gloo",
            use_local_synchronization=len(members) < distributed.get_world_size(),
        )
        if limit is not None and parallel.mesh.device_type == "cpu":
            # else a rank that stops inside the model is waited for as long as it was while loading
            backend = parallel.group._get_backend(torch.device("cpu"))
            self._restore = backend, backend.options._timeout
            backend._set_default_timeout(limit)

    @property
    def leads(self) -> bool:
        """Whether this process takes requests in."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Generator[None]:
        """Raise on every rank what one of them raises in the body: its own error there, and
        RuntimeError with the rank and the error on the others. The group is closed then.
        """
        if self._group is None:
            yield
            return
        try:
            error: Exception | None = None
            try:
                yield
            except Exception as raised:
                error = raised
            texts = self._gather(error and f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            for rank, text in enumerate(texts):
                if text is not None:
                    raise RuntimeError(f"rank {rank} of {self.size} cannot serve: {text}")
        except BaseException:
            self.close()
            raise

    def agree_on_facts(self, facts: Facts, config: ContinuousBatchingConfig) -> Facts:
        """These facts with the smallest memory of all ranks; ValueError names what else differs."""
        if self._group is None:
            return facts
        host = -1 if facts.host_memory is None else facts.host_memory
        smallest = self._reduce([facts.free_memory, host], distributed.ReduceOp.MIN)
        facts = replace(
            facts, free_memory=smallest[0], host_memory=None if smallest[1] < 0 else smallest[1]
        )
        settings = {name: v for name, v in vars(config).items() if name not in _OF_RANK_0}
        self._compare({**_versions(), **settings, **asdict(facts)})
        return facts

    def agree(self, status: int, paused: bool, has_news: bool) -> tuple[int, bool, bool]:
        """Once a step: the highest stop status, whether every rank asks for a pause, and whether
        rank 0 has something to `spread`. A process that is alone always may have.
        """
        if self._group is None:
            return status, paused, True
        values = [status, not paused, has_news and self.leads]
        status, runs, news = self._reduce(values, distributed.ReduceOp.MAX)
        return status, not runs, bool(news)

    def all(self, flag: bool) -> bool:
        """Whether every rank says so."""
        if self._group is None:
            return flag
        return bool(self._reduce([flag], distributed.ReduceOp.MIN)[0])

    def spread(
        self, requests: list[Request], cancellations: list[str]
    ) -> tuple[list[Request], list[str]]:
        """What rank 0 took in, on every rank. Code of a request's own stays with rank 0, which
        asks it for all.
        """
        if self._group is None:
            return requests, cancellations
        plain = [replace(each, processors=None, stop=each.stop and True) for each in requests]
        arrived, cancellations = self._share((plain, cancellations))
        return [
            each if each.stop is None else replace(each, stop=_Decision(self, each.stop))
            for each in (requests if self.leads else arrived)
        ], cancellations

    def take_over(self, token: Tensor, logprob: Tensor | None) -> None:
        """Write rank 0's tokens, and their log-probabilities, over those of the others, behind the
        work that is launched; the host waits for no device.
        """
        if self._parallel is not None:
            for tensor in (token, logprob):
                if tensor is not None:
                    distributed.broadcast(tensor, self._root, group=self._parallel.group)

    def wait_for(self, event: Any) -> None:
        """Wait for an event of the device; RuntimeError after the timeout if there are others to
        wait for.
        """
        if self._group is None or self._timeout is None:
            event.synchronize()
            return
        deadline = monotonic() + self._timeout
        while not event.query():
            if monotonic() > deadline:
                raise RuntimeError(_TIMED_OUT)
            sleep(_LOOK_AGAIN)

    def reason(self, error: BaseException) -> str:
        """Why requests fail that this error ends."""
        text = f"{type(error).__name__}: {error}"
        if self._group is None or not _is_of_group(error):
            return text
        limit = f"cpu_group_timeout, {self._timeout} s"
        return f"another of the {self.size} ranks died or did not answer in time ({limit}): {text}"

    def close(self) -> None:
        """Leave the group; who still waits in it learns of that at once."""
        if self._restore is not None:
            backend, limit = self._restore
            backend._set_default_timeout(limit)
            self._restore = None
        group, self._group = self._group, None
        if group is not None and distributed.is_initialized():
            distributed.destroy_process_group(group)

    def _compare(self, mine: Mapping[str, Any]) -> None:
        """Raise ValueError on every rank if one has another value of anything."""
        everyone = self._gather({name: repr(value) for name, value in mine.items()})
        for rank, other in enumerate(everyone):
            for name, value in everyone[0].items():
                if other.get(name) != value:
                    raise ValueError(
                        f"{name} is {other.get(name)} on rank {rank} and {value} on rank 0; "
                        "accepted: the same on all ranks of a model"
                    )

    def _reduce(self, values: list[int], how: Any) -> list[int]:
        numbers = torch.tensor(values, dtype=torch.int64, device="cpu")
        distributed.all_reduce(numbers, how, group=self._group)
        return numbers.tolist()

    def _gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def _share(self, value: T) -> T:
        """Rank 0's value."""
        box: list[Any] = [value if self.leads else None]
        distributed.broadcast_object_list(
            box, self._root, group=self._group, device=torch.device("cpu")
        )
        return box[0]


class _Decision:
    """What ends a request, asked on rank 0 alone: its code may read a clock."""

    def __init__(self, ranks: Ranks, stop: Any) -> None:
        self._ranks, self._stop = ranks, stop

    def __call__(self, prompt: Any, generated: Any) -> bool | str:
        """As `Request.stop`, on every rank at once."""
        own = self._stop(prompt, generated) if self._ranks.leads else False
        return self._ranks._share(own)


_TIMED_OUT = "a batch is not done, for which all ranks have to work"


def _is_of_group(error: BaseException) -> bool:
    """Whether an error comes from ranks that cannot reach each other; gloo has no class for it."""
    signs = ("gloo", "Connection closed", "Timed out", _TIMED_OUT, "Connection reset", "NCCL")
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _versions() -> dict[str, str]:
    """What all ranks must have in common, by name."""
    own = sys.modules["tcb"].__version__
    theirs = {module.__name__: module.__version__ for module in (torch, transformers)}
    return {"tcb": own, "python": platform.python_version(), **theirs}
