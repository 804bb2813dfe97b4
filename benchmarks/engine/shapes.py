"""The models of ``benchmarks.engine --shape``: what each has other than Llama-3.1-8B, as fields of
``config.json``, in its published shape unless the title says otherwise. They get random weights in
16 bits.
"""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A model by name, and its fields."""

    title: str
    fields: dict[str, Any]


LLAMA_2_TOKENS = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2}
SHAPES = {
    "8b": Shape("Llama-3.1-8B's shape", {}),
    # the models of FastTree's section 6.2
    "llama2-7b": Shape(
        "Llama-2-7B's shape",
        {"intermediate_size": 11008, "num_key_value_heads": 32, **LLAMA_2_TOKENS},
    ),
    "mistral-7b": Shape("Mistral-7B's shape", dict(LLAMA_2_TOKENS)),
    "70b": Shape(
        "Llama-3.1-70B's shape",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "gemma3-12b": Shape(
        "Gemma-3-12B's shape",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
    # Sinks in all layers, windows in every second one. Experts are 38 GB here, and 10 in the 4 bits
    # that are published, so they take four times as long.
    "gpt-oss-20b": Shape(
        "gpt-oss-20b's shape",
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "attention_bias": True,
            "vocab_size": 201088,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "bos_token_id": 199998,
            "eos_token_id": 200002,
        },
    ),
    # The 512 experts of all layers are 155 GB, 64 are 19. 64 requests that choose 10 each read all
    # of these, and would read 0.7 of those: so experts take a sixth of the time of the whole model.
    "qwen3-next": Shape(
        "Qwen3-Next-80B-A3B's shape with 64 of 512 experts",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 64,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000000.0,
            "max_position_embeddings": 262144,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
        },
    ),
    # 16 heads: also what one GPU of eight has of the 128 of DeepSeek-V2 and V3, whose other layers
    # are larger
    "deepseek-v2-lite": Shape(
        "DeepSeek-V2-Lite's shape",
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "vocab_size": 102400,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 163840,
            "bos_token_id": 100000,
            "eos_token_id": 100001,
        },
    ),
}
#: to tell rounding that chooses other experts from the rest: here all are chosen
SHAPES["gpt-oss-20b-4-experts"] = Shape(
    "gpt-oss-20b's shape with 4 of 32 experts, all chosen",
    {**SHAPES["gpt-oss-20b"].fields, "num_local_experts": 4},
)
