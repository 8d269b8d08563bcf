"""Continuous batching for transformers models: `tcb.generate_batch(model, prompts)`.

The public names; each is imported when it is first asked for, so `import tcb` loads neither torch
nor triton. Type checkers read the imports below.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tcb.api import attach as attach
    from tcb.api import continuous_batching_context_manager as continuous_batching_context_manager
    from tcb.api import (
        destroy_cached_continuous_batching_manager as destroy_cached_continuous_batching_manager,
    )
    from tcb.api import generate_batch as generate_batch
    from tcb.api import init_continuous_batching as init_continuous_batching
    from tcb.api import install as install
    from tcb.api import uninstall as uninstall
    from tcb.planning.config import ContinuousBatchingConfig as ContinuousBatchingConfig
    from tcb.planning.limits import WorkloadHints as WorkloadHints
    from tcb.planning.output import GenerationOutput as GenerationOutput
    from tcb.planning.output import RequestStatus as RequestStatus
    from tcb.service.manager import ContinuousBatchingManager as ContinuousBatchingManager
    from tcb.service.outlet import Stats as Stats

__version__ = "0.1.0"

_HOMES = {
    "generate_batch": "tcb.api",
    "init_continuous_batching": "tcb.api",
    "continuous_batching_context_manager": "tcb.api",
    "destroy_cached_continuous_batching_manager": "tcb.api",
    "install": "tcb.api",
    "uninstall": "tcb.api",
    "attach": "tcb.api",
    "ContinuousBatchingManager": "tcb.service.manager",
    "Stats": "tcb.service.outlet",
    "ContinuousBatchingConfig": "tcb.planning.config",
    "WorkloadHints": "tcb.planning.limits",
    "GenerationOutput": "tcb.planning.output",
    "RequestStatus": "tcb.planning.output",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
