"""Keeps a CPU's OpenMP workers from spinning where other processes need the processors.

GNU's libgomp lets the workers of a team spin for milliseconds before they sleep. On a machine with
other work, a worker that is not scheduled then holds up all that spin for it, and this at each of
the hundreds of parallel regions of a step. libgomp spins a thousandth of that once the process has
more OpenMP threads than processors. So an idle team is made: a thread that ran one parallel region,
and waits. It costs no processor time and can be had at any time, unlike `GOMP_SPINCOUNT`, which is
read where the library is loaded.
"""

import os
import threading

import torch

# elements of a tensor that torch adds to with all threads
_PARALLEL = 2**18
_lock = threading.Lock()
# the process in which an idle team waits, and of how many threads: a fork has none of its parent's
_made: set[tuple[int, int]] = set()


def calm_workers() -> None:
    """Make an idle team where torch uses more than half of the processors; once for each number of
    threads.

    With fewer threads there is room for others, and with one there is nobody to wait for.
    """
    threads = torch.get_num_threads()
    if threads == 1 or 2 * threads <= _processors():
        return
    with _lock:
        if (os.getpid(), threads) in _made:
            return
        ready = threading.Event()
        thread = threading.Thread(target=_idle, args=(ready,), name="tcb-idle-team", daemon=True)
        thread.start()
        ready.wait()
        _made.add((os.getpid(), threads))


def _idle(ready: threading.Event) -> None:
    try:
        torch.zeros(_PARALLEL).add_(1.0)
    finally:
        ready.set()
    threading.Event().wait()


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
