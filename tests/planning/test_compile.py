"""Levels and compile configs say what transformers says by them."""

import pytest
from transformers import CompileConfig

from tcb.planning.compile import Compilation, compilations
from tcb.planning.config import ContinuousBatchingConfig, check

TUNED = "max-autotune-no-cudagraphs"


def asked(**settings):
    config = ContinuousBatchingConfig(**settings)
    check(config)
    return compilations(config)


def test_levels():
    assert asked() == (None, None)
    assert asked(default_compile_level=1) == 2 * (Compilation(dynamic=True, mode="default"),)
    assert asked(default_compile_level=2) == 2 * (Compilation(dynamic=True, mode=TUNED),)
    assert asked(default_compile_level=3) == 2 * (Compilation(mode=TUNED),)
    assert asked(use_default_compile_configs=True) == asked(default_compile_level=3)
    assert asked(use_default_compile_configs=False, default_compile_level=1) == (None, None)


@pytest.mark.parametrize(
    "given", [{"mode": TUNED, "dynamic": True}, CompileConfig(True, mode=TUNED)]
)
def test_a_config_wins_over_the_level(given):
    dynamic = given["dynamic"] if isinstance(given, dict) else None
    own = Compilation(dynamic=dynamic, mode=TUNED)
    level = asked(default_compile_level=1)[0]
    assert asked(varlen_compile_config=given) == (own, None)
    assert asked(decode_compile_config=given, default_compile_level=1) == (level, own)


@pytest.mark.parametrize("name", ["varlen_compile_config", "decode_compile_config"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("mode", "fastest"), ("mode", None), ("dynamic", "yes"), ("backend", 3), ("options", [1])],
)
def test_a_field_that_is_not_accepted_is_named_with_its_value(name, field, value):
    with pytest.raises(ValueError, match=rf"^{name}\.{field} is .*; accepted: ") as caught:
        asked(**{name: {field: value}})
    assert repr(value) in str(caught.value)


def test_an_unknown_field_is_named():
    with pytest.raises(TypeError, match="varlen_compile_config has 'modes', which is unknown"):
        asked(varlen_compile_config={"modes": "default"})
