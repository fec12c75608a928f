# SPDX-License-Identifier: Apache-2.0
"""Tiny configurations of the models of transformers, found by the names of their settings.

`tiny(config_class)` starts from the library's defaults and makes small what decides on size:
widths, depths, vocabularies. What decides on arithmetic (activations, dropout, biases, tied
weights, kinds of attention) stays as it is. `OVERRIDES` has settings that depend on each other.
"""

from __future__ import annotations

from typing import Any

WORDS, LENGTH, WIDTH, HEADS, IMAGE, PATCH, LABELS = 97, 12, 32, 4, 32, 8, 3

#: Setting: its value in a tiny model, wherever the library's default has it as a number.
_SMALL = (
    dict.fromkeys(
        "hidden_size d_model dim n_embd embed_dim embedding_size word_embed_proj_dim d_embed "
        "emb_dim attention_hidden_size d_hidden codebook_dim entity_emb_size lstm_hidden_size "
        "encoder_hidden_size decoder_hidden_size mask_feature_size feature_size "
        "fpn_feature_size mlp_dim_out pooled_projection_dim lm_head_hidden_size "
        "attention_dim hidden_dim_size conv_hidden_size".split(),
        WIDTH,
    )
    | dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks "
        "num_encoder_layers num_decoder_layers num_hidden_groups n_blocks depth "
        "num_encoder_blocks_ encoder_num_layers decoder_num_layers encoder_num_hidden_layers "
        "decoder_num_hidden_layers num_transformer_layers".split(),
        2,
    )
    | dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
        "attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "linear_num_value_heads mamba_n_heads mamba_num_heads".split(),
        HEADS,
    )
    | dict.fromkeys("num_key_value_heads num_kv_heads linear_num_key_heads".split(), 2)
    | dict.fromkeys(
        "intermediate_size ffn_dim d_ff d_inner n_inner hidden_dim encoder_ffn_dim "
        "decoder_ffn_dim feed_forward_size encoder_intermediate_size decoder_intermediate_size "
        "dim_feedforward feedforward_size shared_expert_intermediate_size "
        "encoder_feedforward_dim decoder_feedforward_dim mlp_dim inner_dim".split(),
        48,
    )
    | dict.fromkeys("moe_intermediate_size expert_ffn_hidden_size".split(), 16)
    | dict.fromkeys(
        "head_dim d_kv d_head attention_head_size v_head_dim global_head_dim swa_head_dim "
        "linear_key_head_dim linear_value_head_dim attention_key_head_size "
        "mamba_d_head mamba_head_dim".split(),
        8,
    )
    | dict.fromkeys("qk_nope_head_dim qk_rope_head_dim".split(), 4)
    | dict.fromkeys("kv_lora_rank q_lora_rank index_head_dim o_lora_rank".split(), 8)
    | dict.fromkeys(
        "num_experts num_local_experts n_routed_experts moe_num_experts n_experts "
        "num_routed_experts num_experts_per_layer index_n_heads".split(),
        4,
    )
    | dict.fromkeys(
        "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts".split(), 2
    )
    | dict.fromkeys("n_group topk_group num_expert_group n_groups mamba_n_groups".split(), 1)
    | dict.fromkeys(
        "max_position_embeddings n_positions max_seq_len max_source_positions "
        "max_target_positions n_ctx context_length block_size_ seq_length "
        "max_encoder_position_embeddings max_decoder_position_embeddings "
        "max_sequence_length model_max_length".split(),
        64,
    )
    | dict.fromkeys(
        "vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size "
        "vocab_size_per_layer_input codebook_size".split(),
        WORDS,
    )
    | dict.fromkeys("image_size img_size input_size".split(), IMAGE)
    | dict.fromkeys("patch_size".split(), PATCH)
    | dict.fromkeys("num_labels".split(), LABELS)
    | dict.fromkeys("time_step_rank dt_rank mamba_dt_rank".split(), 4)
    | dict.fromkeys("state_size mamba_d_state ssm_state_size d_state".split(), 8)
    | dict.fromkeys("num_mel_bins feature_dim".split(), 16)
    | {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "projection_dim": 16,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 8,
        "attention_window": 8,
        "local_attention": 8,
        "first_k_dense_replace": 1,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "chunk_size": 8,
        "mamba_chunk_size": 8,
        "forced_eos_token_id": None,
    }
)

#: The same for settings that are lists with an entry for each stage.
_STAGES: dict[str, list[int]] = (
    {name: [16, 32, 48, 64] for name in "hidden_sizes embed_dims encoder_hidden_sizes".split()}
    | {name: [1, 1, 1, 1] for name in "depths layer_depths encoder_depths".split()}
    | {name: [1, 2, 3, 4] for name in "num_attention_heads num_heads encoder_num_heads".split()}
)

#: Settings of a family that depend on each other. Nested ones by the name of the part.
OVERRIDES: dict[str, dict[str, Any]] = {
    "convnext": {"num_stages": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "data2vec-audio": {"mask_time_length": 2},
    "hubert": {"mask_time_length": 2},
    "sew": {"mask_time_length": 2, "conv_dim": [16, 16], "conv_stride": [5, 2]}
    | {"conv_kernel": [10, 3], "num_feat_extract_layers": 2},
    "unispeech": {"mask_time_length": 2},
    "unispeech-sat": {"mask_time_length": 2},
    "wav2vec2": {"mask_time_length": 2},
    "wav2vec2-conformer": {"mask_time_length": 2},
    "wavlm": {"mask_time_length": 2},
}
for _family in OVERRIDES:
    if "mask_time_length" in OVERRIDES[_family]:
        OVERRIDES[_family] = {
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 4],
            "num_feat_extract_layers": 2,
            "ctc_zero_infinity": True,
            "ctc_loss_reduction": "mean",
        } | OVERRIDES[_family]

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _setting(name: str, default: Any) -> Any:
    """The small value of a setting; the default where its name says nothing of size."""
    if isinstance(default, list | tuple):
        stages = _STAGES.get(name, [])
        return stages[: len(default)] if len(default) <= len(stages) else default
    if default is None and name not in _TOKENS:
        return None
    return _SMALL.get(name, default)


def tiny(config_class: Any, **settings: Any) -> Any:
    """Return a configuration whose model has some ten thousand parameters.

    Args:
        config_class: a configuration class of transformers, of which an instance can be made
            without arguments.
        settings: what the caller needs otherwise.
    """
    default = config_class()
    known = default.to_dict()
    renamed = dict(getattr(default, "attribute_map", {}) or {})
    made: dict[str, Any] = {"num_labels": LABELS}
    for name, value in known.items():
        if name not in renamed and _setting(name, value) != value:
            made[name] = _setting(name, value)
    for name in getattr(default, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None:
            made[name] = tiny(type(part)).to_dict()
    return config_class(**made | OVERRIDES.get(default.model_type, {}) | settings)
