"""config.json contents of a tiny model for every MoE architecture of mlx-lm.

Every input width of an expert is a multiple of 64, so group sizes 32 and 64 quantize everything;
hidden and expert widths differ, so a transposed tensor cannot pass unnoticed. The routing features
of an architecture (groups, biases, shared experts, clamps, latent widths, dense layers) are on,
and windows and sparse-attention budgets are short enough for a prompt of 65 tokens to hit them.

Fields that an architecture does not know are ignored by mlx-lm, as in real config files.
"""

from typing import Any

Config = dict[str, Any]

_BASE: Config = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_intermediate_size": 128,
}
_NO_HEAD_DIM = {key: value for key, value in _BASE.items() if key != "head_dim"}
_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention"]

_YARN: Config = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MLA: Config = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
# Latent width 64 needs a hidden width that differs from it.
_WIDE: Config = {"hidden_size": 128, "intermediate_size": 192}

_DEEPSEEK: Config = _BASE | {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_DEEPSEEK_V3: Config = _DEEPSEEK | _MLA | {"rope_scaling": _YARN, "attention_bias": True}
_SPARSE_INDEX: Config = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 24}

_BAILING: Config = _NO_HEAD_DIM | {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "use_bias": True,
    "use_qkv_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
_BAILING_HYBRID: Config = (
    _BAILING
    | _MLA
    | {
        "model_type": "bailing_hybrid",
        "head_dim": 32,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "score_function": "sigmoid",
        "moe_shared_expert_intermediate_size": 64,
    }
)

_GEMMA4: Config = _BASE | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 256,
    "use_double_wide_mlp": False,
    "tie_word_embeddings": True,
}

_GRANITE: Config = _NO_HEAD_DIM | {
    "intermediate_size": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "tie_word_embeddings": True,
}

_LONGCAT: Config = (
    _BASE
    | _MLA
    | {
        "attention_method": "MLA",
        "num_layers": 2,
        "ffn_hidden_size": 192,
        "expert_ffn_hidden_size": 128,
        "n_routed_experts": 8,
        "zero_expert_num": 4,
        "zero_expert_type": "identity",
        "moe_topk": 3,
        "norm_topk_prob": True,
        "router_bias": True,
        "routed_scaling_factor": 1.5,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    }
)

_MINIMAX: Config = _BASE | {
    "intermediate_size": 128,
    "shared_intermediate_size": 0,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "rotary_dim": 16,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
}

_MISTRAL4: Config = (
    _DEEPSEEK
    | _MLA
    | {
        "model_type": "mistral4",
        "rope_interleave": True,
        "rope_parameters": _YARN
        | {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    }
)

_QWEN3_MOE: Config = _BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
_QWEN3_NEXT: Config = _QWEN3_MOE | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "mlp_only_layers": [1],
    "shared_expert_intermediate_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_QWEN3_5: Config = _QWEN3_NEXT | {
    "num_hidden_layers": 2,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}

_KIMI_DELTA: Config = {
    "kda_layers": [1, 2, 4],
    "full_attn_layers": [3],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
_KIMI_MOE: Config = {
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "num_expert_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "model_max_length": 4096,
}

_DEEPSEEK_V41: Config = _BASE | {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "scoring_func": "sqrtsoftplus",
    "gate_temp": 0.7,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,
    "sliding_window": 16,
    # Layer 1 compresses, indexes and picks candidates; 2 reuses its picks; 3 indexes again.
    "compress_ratios": [0, 4, 4, 4],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1, 3],
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 4,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 4,
    "rope_scaling": _YARN,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    "rms_norm_eps": 1e-6,
}

_MAMBA_HEADS: Config = {"mamba_proj_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 32}

_LLAMA4_TEXT: Config = _BASE | {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "intermediate_size_mlp": 192,
    "interleave_moe_layer_step": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
    "use_qk_norm": True,
    "attn_temperature_tuning": 4,
    "floor_scale": 16,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}

_HADAMARD_MODULES = [
    {"path": path, "block": 0, "dtype": "float16", "embedding": path.endswith("embed_tokens")}
    for path in (
        "model.embed_tokens",
        "lm_head",
        *(
            f"model.layers.{layer}.mlp.shared_expert.{name}"
            for layer in range(2)
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
    )
]


# The name is the model_type, or mlx-lm's module where the two differ and the module has no other.
ARCHITECTURES: dict[str, Config] = {
    "Klear": _BASE
    | {
        "model_type": "Klear",
        "attention_bias": True,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    "afmoe": _BASE
    | {
        "model_type": "afmoe",
        "layer_types": _WINDOWS,
        "sliding_window": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_norm": True,
        "route_scale": 2.0,
        "score_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "mup_enabled": True,
    },
    "bailing_hybrid": _BAILING_HYBRID,
    "bailing_moe_v3": _BAILING_HYBRID
    | {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "short_conv_kernel_size": 4,
        "kda_lower_bound": -5.0,
        "kda_safe_gate": True,
        "no_kda_lora": True,
        "rope_interleave": True,
    },
    "bailing_moe": _BAILING | {"model_type": "bailing_moe", "score_function": "softmax"},
    "bailing_moe_linear": _BAILING
    | {
        "model_type": "bailing_moe_linear",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_group_size": 2,
        "group_norm_size": 2,
        "score_function": "sigmoid",
    },
    "deepseek": _DEEPSEEK
    | {
        "model_type": "deepseek",
        "n_shared_experts": 2,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "deepseek_v2": _DEEPSEEK_V3
    | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    "deepseek_v3": _DEEPSEEK_V3 | {"model_type": "deepseek_v3"},
    "kimi_k2": _DEEPSEEK_V3 | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    "joyai_llm_flash": _DEEPSEEK_V3 | {"model_type": "joyai_llm_flash", "q_lora_rank": None},
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": _DEEPSEEK_V3 | {"model_type": "kimi_k2"},
    },
    "kimi_vl": {
        "model_type": "kimi_vl",
        "text_config": _DEEPSEEK_V3 | {"model_type": "deepseek_v3", "q_lora_rank": None},
    },
    "deepseek_v32": _DEEPSEEK_V3 | _SPARSE_INDEX | {"model_type": "deepseek_v32"},
    "glm_moe_dsa": _DEEPSEEK_V3
    | _SPARSE_INDEX
    | {
        "model_type": "glm_moe_dsa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "indexer_rope_interleave": True,
    },
    "deepseek_v41": _DEEPSEEK_V41 | {"model_type": "deepseek_v41"},
    "deepseek_v41_text": {
        "model_type": "deepseek_v41_text",
        "text_config": _DEEPSEEK_V41 | {"scoring_func": "softmax", "swiglu_limit": 0.0},
    },
    "dots1": _DEEPSEEK | {"model_type": "dots1", "mlp_bias": True},
    "ernie4_5_moe": _BASE
    | {
        "model_type": "ernie4_5_moe",
        "use_bias": True,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_gate_act": "softmax",
        "moe_use_aux_free": True,
        "tie_word_embeddings": True,
    },
    "exaone_moe": _BASE
    | {
        "model_type": "exaone_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "layer_types": _WINDOWS,
        "is_moe_layer": [False, True, True],
        "sliding_window": 32,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    # With the features of the small models (per-layer inputs, shared keys) beside the experts.
    "gemma4_text": _GEMMA4
    | {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 64,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
    },
    "gemma4": {"model_type": "gemma4", "vocab_size": 256, "text_config": _GEMMA4},
    "gemma4_unified": {"model_type": "gemma4_unified", "vocab_size": 256, "text_config": _GEMMA4},
    "glm4_moe": _DEEPSEEK
    | {
        "model_type": "glm4_moe",
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "solar_open": _DEEPSEEK
    | {
        "model_type": "solar_open",
        "partial_rotary_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe_lite": _DEEPSEEK_V3 | {"model_type": "glm4_moe_lite"},
    "gpt_oss": _BASE
    | {
        "model_type": "gpt_oss",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
    "granitemoe": _GRANITE | {"model_type": "granitemoe", "attention_bias": True},
    "granitemoehybrid": _GRANITE
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "shared_intermediate_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "hunyuan": _NO_HEAD_DIM
    | {
        "model_type": "hunyuan",
        "moe_topk": [2, 3, 2],
        "moe_intermediate_size": [128, 64, 128],
        "num_shared_expert": [1, 2, 1],
        "num_experts": 8,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 100.0},
    },
    "jamba": _NO_HEAD_DIM
    | {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "kimi_linear": _BASE
    | _MLA
    | _KIMI_MOE
    | {"model_type": "kimi_linear", "linear_attn_config": _KIMI_DELTA},
    "kimi_k3": {
        "model_type": "kimi_k3",
        "text_config": _BASE
        | _WIDE
        | _MLA
        | _KIMI_MOE
        | {
            "model_type": "kimi_linear",
            "hidden_act": "situ",
            "activation_situ_beta": 1.5,
            "activation_situ_linear_beta": 2.0,
            "attn_res_block_size": 2,
            "routed_expert_hidden_size": 64,
            "latent_moe_use_norm": True,
            "mla_use_output_gate": True,
            "linear_attn_config": _KIMI_DELTA
            | {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
        },
    },
    "laguna": _BASE
    | {
        "model_type": "laguna",
        "layer_types": _WINDOWS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 2, 4],
        "sliding_window": 32,
        "gating": True,
        "qkv_bias": True,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 64,
        "moe_routed_scaling_factor": 2.0,
        "moe_router_logit_softcapping": 2.0,
        "moe_router_score_func": "sigmoid",
        "rope_parameters": {
            "full_attention": _YARN | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "lfm2_moe": _NO_HEAD_DIM
    | {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.5,
        "norm_eps": 1e-5,
        "conv_bias": True,
        "conv_L_cache": 3,
    },
    "llama4": {"model_type": "llama4", "text_config": _LLAMA4_TEXT},
    "longcat_flash": _LONGCAT | {"model_type": "longcat_flash"},
    "longcat_flash_ngram": _LONGCAT
    | {
        "model_type": "longcat_flash_ngram",
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 1,
    },
    "mellum": _QWEN3_MOE
    | {
        "model_type": "mellum",
        "layer_types": _WINDOWS,
        "sliding_window": 32,
        "rope_parameters": {
            "full_attention": _YARN | {"rope_type": "yarn", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "mimo_v2_flash": _DEEPSEEK
    | {
        "model_type": "mimo_v2_flash",
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 32,
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 5000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 16,
        "v_head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_value_scale": 0.7,
    },
    "minimax": _MINIMAX | {"model_type": "minimax"},
    "minimax_m2": _MINIMAX | {"model_type": "minimax_m2", "tie_word_embeddings": True},
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        "text_config": _BASE
        | {
            "model_type": "minimax_m3",
            "intermediate_size": 128,
            "dense_intermediate_size": 192,
            "shared_intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_layer_freq": [0, 1, 1],
            "routed_scaling_factor": 2.0,
            "rotary_dim": 16,
            "use_qk_norm": True,
            "use_gemma_norm": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 1.0,
            "sparse_attention_config": {
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 32,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 3,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1, 1],
            },
        },
    },
    "mistral3": {"model_type": "mistral3", "text_config": _MISTRAL4},
    "mistral4": _MISTRAL4,
    "mixtral": _NO_HEAD_DIM
    | {
        "model_type": "mixtral",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "muse_spark": {
        "model_type": "muse_spark",
        "text_config": _BASE
        | _WIDE
        | {
            "model_type": "muse_spark_text",
            "post_norm_eps": 1e-8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_rope_theta": [0, 10000.0, 10000.0],
            "layer_types": _WINDOWS,
            "sliding_window": 32,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_hidden_size": 64,
            "routed_scaling_factor": 2.0,
        },
    },
    "nemotron_h": _DEEPSEEK
    | _WIDE
    | _MAMBA_HEADS
    | {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": ["M", "E", "*", "-", "E", "M", "E"],
        "num_hidden_layers": 7,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmoe": _BASE
    | {
        "model_type": "olmoe",
        "intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "phimoe": _NO_HEAD_DIM
    | {
        "model_type": "phimoe",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.05,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5],
            "short_mscale": 1.1,
            "long_mscale": 1.2,
        },
    },
    "phixtral": {
        "model_type": "phi-msft",
        "num_vocab": 256,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "prism_hadamard_qwen35": {
        "model_type": "prism_hadamard_qwen35",
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": _HADAMARD_MODULES,
        "text_config": _QWEN3_5
        | {
            "model_type": "qwen3_5_text",
            "hidden_size": 128,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
        },
    },
    "qwen2_moe": _NO_HEAD_DIM
    | {
        "model_type": "qwen2_moe",
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 64,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe": {"model_type": "qwen3_vl_moe", "text_config": _QWEN3_MOE},
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": _QWEN3_5 | {"model_type": "qwen3_5_text"},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": _QWEN3_5 | {"model_type": "qwen3_5_moe_text"},
    },
    "step3p5": _BASE
    | {
        "model_type": "step3p5",
        "num_attention_groups": 2,
        "layer_types": _WINDOWS,
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
        "sliding_window": 32,
        "rope_theta": [10000.0, 5000.0, 5000.0],
        "rope_scaling": _LLAMA4_TEXT["rope_scaling"],
        "yarn_only_types": ["full_attention"],
        "partial_rotary_factors": [0.5, 1.0, 1.0],
        "use_head_wise_attn_gate": True,
        "moe_num_experts": 12,
        "moe_top_k": 3,
        "moe_layers_enum": "1,2",
        "moe_router_scaling_factor": 2.0,
        "norm_expert_weight": True,
        "share_expert_dim": 64,
        "swiglu_limits": [0.0, 0.0, 1.0],
        "swiglu_limits_shared": [0.0, 1.5, 0.0],
    },
}

# Architectures that mlx-lm cannot run on the CPU backend -> what stops them.
EXCEPTIONS: dict[str, str] = {
    "muse_spark": "its router, query/key norms and residual norms exist only as Metal kernels",
}
