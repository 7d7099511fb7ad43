"""Sessions of the zoo's models to record: the kinds of caches and the ways to a mask that the first sessions lack.

Sizes are smaller than the zoo's, since every array is kept, and windows so small that rings wrap. Recurrent models stay
with float32, in which they keep a part of their state whatever their dtype.
"""

from __future__ import annotations

from typing import Any

from conformance.sessions import Action, Finish, Next, PutBack, Remove, Session, prompts, segments, session

CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK: tuple[Action, ...] = (
    prompts((5, 9, 2, 7, 11, 3, 14), (8, 4, 13), max_tokens=(3, 5)),
    Next(4),
    prompts((20, 21), max_tokens=(3,)),
    Finish(),
    prompts((30, 31, 32, 33), max_tokens=(2,)),
    PutBack(0, (35, 8), 3),
    Finish(),
)
"""Prompts are fed in chunks, a ragged one among them; a row joins late, rows leave one by one, one comes back."""

REMOVED_IN_MID_PREFILL: tuple[Action, ...] = (
    prompts((5, 9, 2, 7, 11, 3, 14), (8, 4, 13, 10, 3, 17, 18, 19), (30, 31), max_tokens=(3, 3, 5)),
    Next(2),
    Remove((1,)),
    Finish(),
    PutBack(2, (12, 6, 1), 2),
    Finish(),
)
"""Of three rows one is taken out while its prompt is fed, another comes back alone."""

SEGMENTS: tuple[Action, ...] = (
    segments(((4, 8, 15, 16), (23, 42, 7)), ((7, 1), (2, 3, 4, 9, 5)), max_tokens=(3, 6)),
    Next(5),
    prompts((20, 21, 22), max_tokens=(2,)),
    Finish(),
    PutBack(1, (33,), 2),
    Finish(),
)
"""The generator stops between the segments; a row joins, another comes back."""

TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
SLIDING: dict[str, Any] = {**TWO_LAYERS, "sliding_window": 5}
LATENTS: dict[str, Any] = {"num_hidden_layers": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]

ZOO_SESSIONS: tuple[Session, ...] = (
    session(
        "gemma2/rows_come_back",
        "masks that a model adds to its capped scores; rows join, leave and come back",
        "PendingPadding ArrayAskedFor AfterExtract AfterMerge",
        "float32",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=3,
        layers=(1,),
        sizes={**TWO_LAYERS, "num_key_value_heads": 2},
    ),
    session(
        "gemma3n/fewer_caches_than_layers",
        "of four layers the last two read what the first two have fetched; rows join, leave and come back",
        "PendingPadding LongerThanRing Wrapped AfterExtract AfterMerge",
        "float32",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=4,
        sizes={**SLIDING, "num_hidden_layers": 4},
    ),
    session(
        "gemma4_text/heads_of_two_sizes",
        "the ring's heads are half as wide as the growing cache's, and later layers read both",
        "PendingPadding LongerThanRing Wrapped OtherHeads OtherDtype AfterExtract AfterMerge",
        "bfloat16",
        *SEGMENTS,
        sizes={**SLIDING, "num_hidden_layers": 4, "global_head_dim": 8},
    ),
    session(
        "cohere2/rows_come_back_to_rings",
        "keys of the growing cache are not rotated; rows join wrapped rings, leave and come back",
        "PendingPadding LongerThanRing Wrapped AfterExtract AfterMerge",
        "float16",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=4,
        sizes={**SLIDING, "hidden_size": 8},
    ),
    session(
        "olmo3/removed_in_mid_prefill",
        "a row is taken out of a ring and a growing cache while its prompt is fed, another comes back alone",
        "PendingPadding LongerThanRing Wrapped AfterExtract AfterMerge",
        "float32",
        *REMOVED_IN_MID_PREFILL,
        prefill_step_size=3,
        sizes={**SLIDING, "layer_types": SLIDING_AND_FULL},
    ),
    session(
        "exaone4/segments",
        "prompts stop at the ends of their segments, and a row joins wrapped rings",
        "PendingPadding LongerThanRing Wrapped AfterExtract AfterMerge",
        "bfloat16",
        *SEGMENTS,
        sizes=SLIDING,
    ),
    session(
        "deepseek_v3/latents",
        "one head of latents for keys, narrower ones for values; rows join, leave and come back",
        "PendingPadding OtherHeads ArrayAskedFor AfterExtract AfterMerge",
        "float32",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=3,
        layers=(1,),
        sizes=LATENTS,
    ),
    session(
        "minicpm3/keys_wider_than_values",
        "keys are half as wide again as values; a row is taken out in mid-prefill, another comes back alone",
        "PendingPadding OtherHeads OtherDtype AfterExtract AfterMerge",
        "bfloat16",
        *REMOVED_IN_MID_PREFILL,
        prefill_step_size=3,
        layers=(1,),
        sizes={**LATENTS, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
    ),
    session(
        "mamba2/a_tail_and_a_state",
        "a convolution's tail and a recurrent state: ragged chunks, a late row, rows that leave, one that comes back",
        "Recurrent PendingPadding AfterExtract AfterMerge",
        "float32",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=3,
        layers=(1,),
        sizes={"num_hidden_layers": 2, "num_heads": 2, "head_dim": 8, "state_size": 4},
    ),
    session(
        "lfm2/removed_in_mid_prefill",
        "one slot, and a growing cache beside: a row is taken out in mid-prefill, another comes back alone",
        "Recurrent PendingPadding AfterExtract AfterMerge",
        "float32",
        *REMOVED_IN_MID_PREFILL,
        prefill_step_size=3,
        sizes={**TWO_LAYERS, "full_attn_idxs": [1], "hidden_size": 16, "block_dim": 16},
    ),
    session(
        "qwen3_next/segments",
        "the gated delta rule's state, and a growing cache beside: segments, a late row, one that comes back",
        "Recurrent PendingPadding AfterExtract AfterMerge",
        "float32",
        *SEGMENTS,
        sizes={
            **TWO_LAYERS,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 4,
        },
    ),
    session(
        "kimi_linear/four_slots",
        "four slots, and a growing cache of latents beside: ragged chunks, a late row, one that comes back",
        "Recurrent PendingPadding OtherHeads ArrayAskedFor AfterExtract AfterMerge",
        "float32",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=3,
        sizes={
            **LATENTS,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1],
                "num_heads": 2,
                "head_dim": 4,
                "short_conv_kernel_size": 3,
            },
        },
    ),
    session(
        "granitemoehybrid/removed_in_mid_prefill",
        "a recurrent state or a growing cache, layer by layer: a row is taken out in mid-prefill, another comes back",
        "Recurrent PendingPadding AfterExtract AfterMerge",
        "float32",
        *REMOVED_IN_MID_PREFILL,
        prefill_step_size=3,
        sizes={
            **TWO_LAYERS,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 2,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
        },
    ),
    session(
        "falcon_h1/states_beside_keys_and_values",
        "each layer's list holds a recurrent state and a growing cache: ragged chunks, a late row, one that comes back",
        "List Recurrent PendingPadding AfterExtract AfterMerge",
        "float32",
        *CHUNKS_A_LATE_ROW_AND_ONE_PUT_BACK,
        prefill_step_size=3,
        layers=(1,),
        sizes={**TWO_LAYERS, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 4},
    ),
    session(
        "longcat_flash/two_caches_a_layer",
        "each layer's list holds two growing caches of latents: a row is taken out in mid-prefill, another comes back",
        "List PendingPadding OtherHeads ArrayAskedFor AfterExtract AfterMerge",
        "float32",
        *REMOVED_IN_MID_PREFILL,
        prefill_step_size=3,
        layers=(1,),
        sizes={"num_layers": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    ),
    session(
        "deepseek_v32/keys_of_an_indexer",
        "each layer's list holds latents and an indexer's keys, which it feeds as values too: segments, a late row",
        "List PendingPadding ArrayAskedFor AfterExtract AfterMerge",
        "float32",
        *SEGMENTS,
        layers=(1,),
        sizes={**LATENTS, "qk_rope_head_dim": 8, "index_head_dim": 8},
    ),
    session(
        "llama4/chunks",
        "rows one after the other, in pieces that end within a chunk and across its end, then token by token",
        "Chunked SeveralTokens OneToken",
        "float32",
        prompts((5, 9, 2, 7, 11, 3, 14, 6, 12, 1, 13), (8, 4, 10), (30, 31, 32, 33, 34, 35), max_tokens=(4, 7, 5)),
        prefill_step_size=4,
        layers=(0, 3),
        sizes={"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "attention_chunk_size": 5},
    ),
)
