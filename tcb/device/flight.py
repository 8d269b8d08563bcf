"""A launched batch, and the way home of its tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tcb.device.ranks import Ranks


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A launched batch. `land` waits for it and returns tokens and log-probabilities, one a
    sample.
    """

    token: Tensor
    logprob: Tensor | None
    errors: dict[int, str]
    event: Any

    def land(self, ranks: Ranks) -> tuple[list[int], list[float] | None]:
        """Tokens (-1: the sample failed) and log-probabilities if they were asked for; the host
        waits here.
        """
        if self.event is not None:
            ranks.wait_for(self.event)
        return self.token.tolist(), None if self.logprob is None else self.logprob.tolist()


def send_home(token: Tensor, logprob: Tensor | None, errors: dict[int, str]) -> InFlightBatch:
    """The batch of these tokens [samples]; from a device they are on their way, nobody waits."""
    if token.device.type == "cpu":
        return InFlightBatch(token, logprob, errors, None)
    home = token.to("cpu", non_blocking=True)
    home_logprob = None if logprob is None else logprob.to("cpu", non_blocking=True)
    event = torch.get_device_module(token.device).Event()
    event.record()
    return InFlightBatch(home, home_logprob, errors, event)
