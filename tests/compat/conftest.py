"""The fixtures of a tiny model and of managers over an engine without one."""

from tests.support.fixtures import (  # noqa: F401 (pytest finds fixtures by their names here)
    engines,
    expected,
    held,
    manager,
    new,
    nothing_kept,
    prompts,
    tiny,
)
