"""Makes a tiny random model of any causal family that transformers knows, from its name alone.

Sizes are set wherever a configuration has a field of a known name. A configuration takes them in
one of several ways, which are tried in turn. Weights are drawn wide, so that the next token depends
on every position and layer.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, POSITIONS = 97, 256
# fields of one meaning under all names that families give them
_SAME = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size d_model n_embd embed_dim dim embedding_size",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff"
    " ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers decoder_layers encoder_layers num_layers mlp_ratio"
    " num_experts_per_tok moe_topk moe_k num_global_key_value_heads altup_num_inputs",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts rotary_dim"
    " encoder_attention_heads num_key_value_heads num_local_experts n_routed_experts"
    " moe_num_experts",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len",
    8: "head_dim sliding_window attention_window qk_rope_head_dim qk_nope_head_dim v_head_dim"
    " hidden_size_per_layer_input global_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank"
    " kv_lora_rank",
    1: "n_shared_experts n_group topk_group first_k_dense_replace bos_token_id",
    0: "pad_token_id num_kv_shared_layers",
}
SIZES: dict[str, Any] = {name: size for size, names in _SAME.items() for name in names.split()}
SIZES |= {"eos_token_id": None, "is_decoder": True, "is_encoder_decoder": False}
_LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_MOST_PARAMETERS = 120_000_000
# standard deviations of matrices, and of the table of embeddings, that are tried in turn: where the
# table is also the head, wide rows give a token again and again
DRAWS = ((0.5, 0.5), (0.5, 0.05), (1.0, 0.1), (2.0, 4.0))


class CannotBuild(Exception):
    """Why no tiny model of a family could be made."""


def families() -> list[str]:
    """The names of all causal families of the transformers that is installed."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_models(family: str) -> Iterator[PreTrainedModel]:
    """Tiny models of a family, one for each way and each draw, fp32 and in evaluation mode.

    Raises CannotBuild with the reasons if there is no way at all.
    """
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    kind = CONFIG_MAPPING[family]
    reasons = []
    for way in (_by_arguments, _by_writing, _by_text_config):
        try:
            model = _build(model_class, way(kind))
        except Exception as error:
            reasons.append(f"{way.__name__}: {type(error).__name__}: {str(error)[:200]}")
            continue
        for scales in DRAWS:
            _draw_weights(model, *scales)
            yield model
    if len(reasons) == 3:
        raise CannotBuild("; ".join(reasons))


def _by_arguments(kind: type) -> PreTrainedConfig:
    return kind(**_known(kind))


def _by_writing(kind: type) -> PreTrainedConfig:
    config = kind()
    _shrink(config)
    return config


def _by_text_config(kind: type) -> PreTrainedConfig:
    text = type(kind().get_text_config(decoder=True))
    config = kind(text_config=text(**_known(text)).to_dict())
    _shrink(config)
    return config


def _known(kind: Any) -> dict[str, Any]:
    """The sizes that the constructor of a configuration takes."""
    names = {*inspect.signature(kind.__init__).parameters}
    if dataclasses.is_dataclass(kind):
        names |= {each.name for each in dataclasses.fields(kind)}
    return {name: size for name, size in SIZES.items() if name in names}


def _shrink(config: PreTrainedConfig) -> None:
    """Set the sizes of a configuration and of those inside it, and keep a layer of each kind."""
    for name, size in SIZES.items():
        _write(config, name, size)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)
        elif name in _LAYER_KINDS and isinstance(value, list) and value:
            kinds = list(dict.fromkeys(value))
            setattr(config, name, (kinds * 2)[: max(2, len(kinds))])
            if name == "layer_types" and len(kinds) > 2:
                config.num_hidden_layers = len(kinds)


def _build(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    wanted = getattr(model_class, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        config = config.get_text_config(decoder=True)
    for each in (config, *vars(config).values()):
        if isinstance(each, PreTrainedConfig):
            _write(each, "is_decoder", True)
    if config.__dict__.get("head_dim", 0) is None:
        config.head_dim = 8
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > _MOST_PARAMETERS:
        raise CannotBuild(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    if model.generation_config is None:
        model.generation_config = GenerationConfig()
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "max_length"):
        setattr(model.generation_config, name, None)
    return model


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, scale: float, embedding_scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    table = getattr(model.get_input_embeddings(), "weight", None)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            width = parameter.shape[-1]
            own = scale if width <= VOCAB else 4 * scale * width**-0.5
            own = embedding_scale if parameter is table else own
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * own)


def _write(config: PreTrainedConfig, name: str, value: Any) -> None:
    """Set a field that a configuration has; some refuse some of their own, in ways of their own."""
    with suppress(Exception):
        if hasattr(config, name):
            setattr(config, name, value)
