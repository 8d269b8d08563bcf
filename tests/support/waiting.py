"""How tests of the service wait, and what they expect of an output."""

import queue
import threading
from time import monotonic, sleep

from tcb.planning.output import RequestStatus
from tests.support.fake_engine import tokens_after

# seconds after which a test that waits has failed
SOON = 10.0


def in_thread(function, *args, **kwargs):
    """Run in a thread; returns what waits for its result, an exception included."""
    results = queue.SimpleQueue()

    def run():
        try:
            results.put(function(*args, **kwargs))
        except BaseException as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    return lambda: results.get(timeout=SOON)


def until(holds):
    deadline = monotonic() + SOON
    while not holds():
        assert monotonic() < deadline
        sleep(0.001)


def is_done(output, prompt, count=4):
    assert output.error is None
    assert output.status is RequestStatus.FINISHED
    return output.prompt_ids == prompt and output.generated_tokens == tokens_after(prompt, count)


def is_failed(output, *words):
    assert output.status is RequestStatus.FAILED and output.is_finished()
    assert all(word in output.error for word in words), output.error
    return True
