"""Show how many outputs of a call have come."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("ContinuousBatchingLogger")


@contextmanager
def progress(total: int, is_wanted: bool) -> Iterator[Callable[[], object]]:
    """A bar of `total` requests, and what moves it on by one; none where the log is at DEBUG."""
    if not is_wanted or logger.getEffectiveLevel() <= logging.DEBUG:
        yield lambda: None
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    with (
        logging_redirect_tqdm([logger]),
        tqdm(total=total, desc=f"Solving {total} requests", unit="request") as bar,
    ):
        yield bar.update
