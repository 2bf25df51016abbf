"""Sizes of models, and the config.json that mlx-lm reads for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moestream.runtime.errors import InvalidRequest

Kind = Literal["qwen3_moe", "qwen3_next", "gpt_oss"]

GROUP = 64
BITS = 4
MX_GROUP = 32
"""Numbers that share a scale in mxfp4."""

LEAST_LAYERS: dict[Kind, int] = {"qwen3_moe": 1, "qwen3_next": 4, "gpt_oss": 2}
"""mlx-lm looks for a layer of every kind of attention."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
END_TOKENS = [0, 2]
"""Of the demo model's tokenizer."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; those of the delta net are used by qwen3_next alone.

    Attributes:
        inner: width of an expert, and of the shared expert where there is one.
        top_k: experts a token is routed to; recorded routing may have fewer.
        window: of the attention in every other layer of gpt_oss.
        context: positions in config.json.
    """

    layers: int = 4
    experts: int = 64
    top_k: int = 8
    hidden: int = 512
    inner: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    vocabulary: int = 8192
    key_heads: int = 2
    value_heads: int = 4
    linear_head_size: int = 64
    window: int = 128
    context: int = 8192
    rope_theta: float = 1e6
    kind: Kind = "qwen3_moe"

    def __post_init__(self) -> None:
        if self.layers < LEAST_LAYERS[self.kind]:
            least = LEAST_LAYERS[self.kind]
            raise InvalidRequest(f"{self.kind} needs at least {least} layers, not {self.layers}")
        if not 0 < self.top_k <= self.experts:
            raise InvalidRequest(f"top_k={self.top_k} must be from 1 to {self.experts}")
        for name in ("hidden", "inner"):
            if getattr(self, name) % GROUP:
                raise InvalidRequest(f"{name} must be a multiple of {GROUP}")

    def full_attention(self, layer: int) -> bool:
        """Whether the layer has softmax attention over the whole context."""
        return {
            "qwen3_moe": True,
            "qwen3_next": layer % 4 == 3,
            "gpt_oss": layer % 2 == 1,
        }[self.kind]

    def config(self) -> dict[str, Any]:
        """config.json for it."""
        return {
            "model_type": self.kind,
            "architectures": [_ARCHITECTURES[self.kind]],
            "num_hidden_layers": self.layers,
            "num_experts_per_tok": self.top_k,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.context,
            "eos_token_id": END_TOKENS,
            **(_gpt_oss(self) if self.kind == "gpt_oss" else _qwen(self)),
        }


_ARCHITECTURES: dict[Kind, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def _qwen(shape: Shape) -> dict[str, Any]:
    own = {
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.inner,
        "rms_norm_eps": 1e-6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "quantization": {"group_size": GROUP, "bits": BITS, "mode": "affine"},
    }
    if shape.kind == "qwen3_next":
        own |= {
            "shared_expert_intermediate_size": shape.inner,
            "linear_num_key_heads": shape.key_heads,
            "linear_num_value_heads": shape.value_heads,
            "linear_key_head_dim": shape.linear_head_size,
            "linear_value_head_dim": shape.linear_head_size,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
        }
    return own


def _gpt_oss(shape: Shape) -> dict[str, Any]:
    affine = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    paths = ["model.embed_tokens"]
    paths += [f"model.layers.{n}.self_attn.{p}" for n in range(shape.layers) for p in ATTENTION]
    types = ["sliding_attention", "full_attention"]
    return {
        "num_local_experts": shape.experts,
        "rms_norm_eps": 1e-5,
        "sliding_window": shape.window,
        "layer_types": [types[shape.full_attention(n)] for n in range(shape.layers)],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "quantization": {
            "group_size": MX_GROUP,
            "bits": 4,
            "mode": "mxfp4",
            **{path: affine for path in paths},
        },
    }


SHAPES: dict[str, Shape] = {
    "small": Shape(),
    "qwen3-30b-a3b": Shape(
        layers=48,
        experts=128,
        top_k=8,
        hidden=2048,
        inner=768,
        heads=32,
        kv_heads=4,
        head_size=128,
        context=40960,
    ),
    "qwen3-next-80b-a3b": Shape(
        kind="qwen3_next",
        layers=48,
        experts=512,
        top_k=10,
        hidden=2048,
        inner=512,
        heads=16,
        kv_heads=2,
        head_size=256,
        key_heads=16,
        value_heads=32,
        linear_head_size=128,
        context=262144,
        rope_theta=1e7,
    ),
    "gpt-oss-120b": Shape(
        kind="gpt_oss",
        layers=36,
        experts=128,
        top_k=4,
        hidden=2880,
        inner=2880,
        heads=64,
        kv_heads=8,
        head_size=64,
        context=131072,
        rope_theta=150000.0,
    ),
}
"""By name: the sizes of the public models of these names, the vocabulary apart."""
