"""Continuous batching for transformers models: `tcb.generate_batch(model, prompts)`.

The public names; each is imported when it is first asked for, so `import tcb` loads neither torch
nor triton. Nothing is decided here.
"""

from importlib import import_module

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
    "ContinuousBatchingConfig": "tcb.planning.config",
    "WorkloadHints": "tcb.planning.limits",
    "GenerationOutput": "tcb.planning.request",
    "RequestStatus": "tcb.planning.request",
}
__all__ = [*_HOMES]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
