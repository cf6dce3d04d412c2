"""Text encoders, decoders and encoder-decoders of ``transformers``."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.coverage.case import Case, integers
from benchmarks.coverage.hf.architecture import TINY, build

_IDS = "input_ids:int64[batch,seq=2..64]"
_MASK = "attention_mask:int64[batch,seq=2..64]"
_SEGMENTS = "token_type_ids:int64[batch,seq=2..64]"


def _encoder(model_type: str, class_name: str, *more: str, **config: Any) -> Case:
    make = partial(build, model_type, class_name, {**TINY, **config})
    return Case(model_type, "text encoder", make, (_IDS, _MASK, *more))


def _decoder(model_type: str, class_name: str, **config: Any) -> Case:
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    make = partial(build, model_type, class_name, {**TINY, **ids, **config})
    return Case(model_type, "decoder", make, (_IDS, _MASK), constants={"use_cache": False})


def _translator(model_type: str, class_name: str, **config: Any) -> Case:
    make = partial(build, model_type, class_name, {**config, "use_cache": False})
    return Case(model_type, "encoder-decoder", make, (_IDS, _MASK, "decoder_input_ids:int64[batch,target=2..64]"))


_FUNNEL = {
    "vocab_size": 99,
    "block_sizes": [1, 1],
    "d_model": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
    "num_decoder_layers": 1,
}
_XLNET = {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}

ENCODERS = (
    _encoder("albert", "AlbertModel", _SEGMENTS, embedding_size=16),
    _encoder("bert", "BertForSequenceClassification", _SEGMENTS),
    _encoder("big_bird", "BigBirdModel", attention_type="original_full"),
    _encoder("convbert", "ConvBertModel", embedding_size=16, conv_kernel_size=3),
    _encoder("deberta", "DebertaModel", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder(
        "deberta-v2",
        "DebertaV2ForSequenceClassification",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=16,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    _encoder("distilbert", "DistilBertForSequenceClassification", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    _encoder("electra", "ElectraForTokenClassification", _SEGMENTS, embedding_size=16),
    _encoder("esm", "EsmModel", pad_token_id=1, mask_token_id=4, position_embedding_type="rotary"),
    _encoder("longformer", "LongformerModel", attention_window=8),
    _encoder("mobilebert", "MobileBertModel", embedding_size=32, true_hidden_size=32, intra_bottleneck_size=32),
    _encoder(
        "modernbert",
        "ModernBertForSequenceClassification",
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    _encoder("mpnet", "MPNetModel"),
    _encoder("nystromformer", "NystromformerModel", segment_means_seq_len=128, num_landmarks=128, conv_kernel_size=3),
    _encoder("roberta", "RobertaForSequenceClassification"),
    _encoder("roformer", "RoFormerModel", _SEGMENTS, embedding_size=16),
    _encoder("squeezebert", "SqueezeBertModel", embedding_size=32),
    Case(
        "funnel",
        "text encoder",
        partial(build, "funnel", "FunnelModel", _FUNNEL),
        (_IDS, _MASK),
    ),
    Case("xlnet", "text encoder", partial(build, "xlnet", "XLNetModel", _XLNET), (_IDS, _MASK)),
    Case(
        "fnet",
        "text encoder",
        partial(build, "fnet", "FNetModel", TINY),
        (_IDS, _SEGMENTS),
    ),
    Case(
        "layoutlm",
        "text encoder",
        partial(build, "layoutlm", "LayoutLMForTokenClassification", {**TINY, "max_2d_position_embeddings": 128}),
        (_IDS, "bbox:int64[batch,seq=2..64,4]", _MASK, _SEGMENTS),
        {"bbox": lambda shape, sizes, generator: integers(0, 100)(shape, sizes, generator).sort(-1).values},
    ),
)

_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

DECODERS = (
    _decoder("bloom", "BloomForCausalLM", n_layer=2, n_head=4),
    _decoder("cohere", "CohereForCausalLM", num_key_value_heads=2),
    _decoder(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    _decoder("falcon", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2),
    _decoder("gemma", "GemmaForCausalLM", **_GROUPED),
    _decoder("gemma3_text", "Gemma3ForCausalLM", **_GROUPED, sliding_window=8, query_pre_attn_scalar=8),
    _decoder("gpt2", "GPT2LMHeadModel", **_GPT2),
    _decoder(
        "gpt_neo",
        "GPTNeoForCausalLM",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    _decoder("gpt_neox", "GPTNeoXForCausalLM"),
    _decoder("gpt_oss", "GptOssForCausalLM", **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    _decoder("gptj", "GPTJForCausalLM", **_GPT2, rotary_dim=4),
    _decoder("llama", "LlamaForCausalLM", num_key_value_heads=2),
    _decoder("mamba", "MambaForCausalLM", state_size=4),
    _decoder("mamba2", "Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16),
    _decoder("mistral", "MistralForCausalLM", num_key_value_heads=2, sliding_window=8),
    _decoder("mixtral", "MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    _decoder("olmo2", "Olmo2ForCausalLM", num_key_value_heads=2),
    _decoder("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    _decoder("phi", "PhiForCausalLM", num_key_value_heads=2),
    _decoder("phi3", "Phi3ForCausalLM", num_key_value_heads=2),
    _decoder("qwen2", "Qwen2ForCausalLM", num_key_value_heads=2),
    _decoder(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    _decoder("qwen3", "Qwen3ForCausalLM", **_GROUPED),
    _decoder("starcoder2", "Starcoder2ForCausalLM", num_key_value_heads=2),
)

_BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

TRANSLATORS = (
    _translator("bart", "BartForConditionalGeneration", **_BART),
    _translator("led", "LEDModel", **_BART, attention_window=8),
    _translator("longt5", "LongT5Model", **_T5, local_radius=4),
    _translator("marian", "MarianMTModel", **_BART),
    _translator("mbart", "MBartForConditionalGeneration", **_BART),
    _translator("mt5", "MT5ForConditionalGeneration", **_T5),
    _translator("pegasus", "PegasusForConditionalGeneration", **_BART),
    _translator(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        **_T5,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
    ),
    _translator("t5", "T5ForConditionalGeneration", **_T5),
)

CASES = (*ENCODERS, *DECODERS, *TRANSLATORS)
