"""Reads what the settings ask of `torch.compile`: levels and compile configs, as transformers means
them.

The config of a kind of batch wins over the level: `decode_compile_config` for decoding batches,
`varlen_compile_config` for all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_TUNED = "max-autotune-no-cudagraphs"


@dataclass(frozen=True, slots=True)
class Compilation:
    """How one kind of batch is compiled: the arguments of `torch.compile` of these names.

    dynamic  True: any size by one program; None: one size first, any from the second on
    options  of the backend; they take the place of the mode
    """

    dynamic: bool | None = None
    backend: Any = "inductor"
    mode: str = "reduce-overhead"
    options: Mapping[str, Any] | None = None


_LEVELS = (
    None,
    Compilation(dynamic=True, mode="default"),
    Compilation(dynamic=True, mode=_TUNED),
    Compilation(mode=_TUNED),
)
# fields of transformers' CompileConfig; a graph is whole or the batches run eagerly
_ACCEPTED = ("fullgraph", "dynamic", "backend", "mode", "options")


def read_compilation(name: str, value: Any) -> Compilation | None:
    """A setting's dict or CompileConfig object; None stays None.

    Raises ValueError for an unknown mode and an unknown backend's type, TypeError for an unknown
    field; each names the setting, the field and the value.
    """
    if value is None:
        return None
    given = dict(value) if isinstance(value, Mapping) else dict(vars(value))
    if not isinstance(value, Mapping):
        given.pop("_compile_all_devices", None)
    for field in given:
        if field not in _ACCEPTED:
            accepted = ", ".join(_ACCEPTED)
            raise TypeError(f"{name} has {field!r}, which is unknown; accepted: {accepted}")
    given.pop("fullgraph", None)
    compilation = Compilation(**given)
    _expect(name, "mode", compilation.mode in MODES, compilation.mode, ", ".join(MODES))
    dynamic, backend, options = compilation.dynamic, compilation.backend, compilation.options
    _expect(name, "dynamic", dynamic in (None, True, False), dynamic, "None, True and False")
    is_backend = isinstance(backend, str) or callable(backend)
    _expect(name, "backend", is_backend, backend, "names and functions")
    is_options = options is None or isinstance(options, Mapping)
    _expect(name, "options", is_options, options, "None and dicts")
    return compilation


def compilations(config: Any) -> tuple[Compilation | None, Compilation | None]:
    """How mixed and decoding batches are compiled; None: they run eagerly."""
    level = config.default_compile_level
    if config.use_default_compile_configs is not None:
        level = 3 if config.use_default_compile_configs else 0
    mixed, decode = (
        read_compilation(name, getattr(config, name)) or _LEVELS[level]
        for name in ("varlen_compile_config", "decode_compile_config")
    )
    return mixed, decode


def _expect(name: str, field: str, holds: bool, value: Any, accepted: str) -> None:
    if not holds:
        raise ValueError(f"{name}.{field} is {value!r}; accepted: {accepted}")
