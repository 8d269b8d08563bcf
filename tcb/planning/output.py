"""What the engine answers: a snapshot of one request, shaped as transformers shapes it."""

from dataclasses import dataclass, field
from enum import IntEnum
from time import perf_counter


class RequestStatus(IntEnum):
    """Where a request stands, as seen from outside; names and numbers are those of transformers."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4


@dataclass
class GenerationOutput:
    """A snapshot of one request; names, order and defaults of the fields are those of transformers.

    `logprobs` holds one value for each generated token where they were asked for, else it is empty.
    `created_time`, `lifespan` (start, end) and `timestamps` are `time.perf_counter` seconds; -1 in
    `lifespan` is an instant that has not come.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None

    def is_finished(self) -> bool:
        """Whether the request has come to an end, good or bad."""
        return self.status in (RequestStatus.FINISHED, RequestStatus.FAILED)
