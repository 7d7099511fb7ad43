"""The model families, as plain data: between them they meet every kind of cache and every way to a mask.

A family's sizes are about the smallest that its code takes; mlx-lm's Metal kernels for recurrent states count them in
32s. Windows and chunks are of 8 tokens, so that rings wrap and chunks slide within a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

WINDOW = 8
VOCABULARY = 64

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 1000,
    "sliding_window": WINDOW,
}
"""What all families share; each takes those that its code knows."""


@dataclass(frozen=True)
class Family:
    """A model family of mlx-lm."""

    name: str
    """The module under `mlx_lm.models`."""
    caches: str
    """Which caches it takes, and what it asks of them."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Beside `SIZES`."""
    nested: bool = False
    """The module wants its sizes as a `text_config`."""
    alone: str = ""
    """Why mlx-lm does not batch it; its rows are served one at a time then."""
    max_kv_size: int | None = None
    """The bound that `make_prompt_cache` is given: rings with four sinks where the model takes a KVCache."""

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name if self.max_kv_size is None else f"{self.name}, max_kv_size={self.max_kv_size}"


def family(name: str, caches: str, *, nested: bool = False, alone: str = "", **sizes: Any) -> Family:
    return Family(name, caches, sizes, nested, alone)


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"] * 2

FAMILIES: tuple[Family, ...] = (
    family("llama", "KVCache; one mask for all layers"),
    family("qwen3", "KVCache; keys normed before they are rotated", tie_word_embeddings=True),
    family("gemma2", "KVCache; masks added to capped scores", num_key_value_heads=4),
    family("gemma3_text", "RotatingKVCache and KVCache; a mask for each", sliding_window_pattern=2),
    family(
        "gemma3n",
        "fewer caches than layers: the last layers read the keys of earlier ones",
        nested=True,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        rope_local_base_freq=1e4,
        final_logit_softcapping=30.0,
        layer_types=SLIDING_THEN_FULL,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=4,
    ),
    family(
        "gemma4_text",
        "shared layers that fetch again with keys_and_values; heads of two sizes",
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        global_head_dim=16,
        layer_types=SLIDING_THEN_FULL,
    ),
    family(
        "gpt_oss",
        "RotatingKVCache and KVCache; learned attention sinks",
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=SLIDING_THEN_FULL,
    ),
    family(
        "cohere2", "RotatingKVCache, and KVCache of keys without rotation", sliding_window_pattern=2, logit_scale=1.0
    ),
    family("olmo3", "RotatingKVCache and KVCache", layer_types=SLIDING_THEN_FULL),
    family(
        "exaone4",
        "RotatingKVCache and KVCache",
        sliding_window_pattern="LG",
        tie_word_embeddings=True,
        rope_scaling=None,
    ),
    family(
        "deepseek_v3",
        "KVCache of latents: keys and values of other sizes, one head",
        first_k_dense_replace=1,
        **LATENT,
        **EXPERTS,
    ),
    family(
        "minicpm3",
        "KVCache of keys wider than values",
        dim_model_base=32,
        scale_depth=1.4,
        scale_emb=1.0,
        rope_scaling={"original_max_position_embeddings": 1000, "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0]},
        **LATENT,
    ),
    family(
        "longcat_flash",
        "CacheList of two KVCaches in each layer",
        attention_method="MLA",
        zero_expert_type="identity",
        zero_expert_num=1,
        ffn_hidden_size=48,
        moe_topk=2,
        expert_ffn_hidden_size=16,
        num_layers=2,
        n_routed_experts=4,
        routed_scaling_factor=1.0,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        attention_bias=False,
        **{key: size for key, size in LATENT.items() if key != "num_key_value_heads"},
    ),
    family(
        "deepseek_v32",
        "CacheList of two KVCaches, of which the second has keys alone",
        first_k_dense_replace=1,
        index_head_dim=16,
        index_n_heads=2,
        index_topk=6,
        **LATENT,
        **EXPERTS,
    ),
    family(
        "llama4",
        "ChunkedKVCache and KVCache; the model makes the chunks' masks",
        nested=True,
        alone="its mask is made from one offset and start_position",
        attention_bias=False,
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=48,
        num_experts_per_tok=1,
        num_local_experts=2,
        rope_scaling=None,
        use_qk_norm=True,
    ),
    family(
        "mamba2",
        "ArraysCache: a convolution's tail and a recurrent state",
        num_heads=4,
        state_size=32,
        conv_kernel=4,
        n_groups=1,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=True,
        time_step_limit=(0.001, 100.0),
        time_step_rank="auto",
    ),
    family(
        "falcon_h1",
        "CacheList of an ArraysCache and a KVCache in each layer",
        lm_head_multiplier=1.0,
        key_multiplier=1.0,
        ssm_out_multiplier=1.0,
        mamba_d_head=8,
        mamba_d_ssm=32,
        mamba_d_state=32,
        mamba_n_heads=4,
    ),
    family(
        "qwen3_next",
        "ArraysCache (gated delta rule) and KVCache in turn",
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=16,
        mlp_only_layers=[],
        moe_intermediate_size=16,
        partial_rotary_factor=0.5,
        full_attention_interval=2,
    ),
    family(
        "kimi_linear",
        "ArraysCache of four slots, unpacked, and KVCache of latents",
        linear_attn_config={
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        model_max_length=1000,
        num_experts=4,
        moe_intermediate_size=16,
        num_experts_per_token=2,
        num_shared_experts=1,
        **{key: size for key, size in LATENT.items() if key not in ("q_lora_rank", "num_key_value_heads")},
    ),
    family(
        "lfm2",
        "ArraysCache of one slot (short convolutions) and KVCache",
        conv_bias=False,
        conv_L_cache=3,
        block_dim=32,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        block_ff_dim=48,
        full_attn_idxs=[1, 3],
    ),
    family(
        "granitemoehybrid",
        "ArraysCache (mamba) and KVCache, chosen layer by layer",
        attention_bias=False,
        embedding_multiplier=1.0,
        attention_multiplier=0.35,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_proj_bias=False,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_n_groups=1,
        mamba_conv_bias=True,
    ),
)

BY_NAME: dict[str, Family] = {each.name: each for each in FAMILIES}

BOUNDED: tuple[Family, ...] = tuple(
    replace(BY_NAME[name], max_kv_size=WINDOW + 4)
    for name in ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "longcat_flash", "falcon_h1")
)
"""Families with a bound: rings with sinks, alone, beside rings without, of latents, in lists."""
