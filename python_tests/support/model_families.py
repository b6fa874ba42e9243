"""Tiny models of transformers' families, and the table of docs/models.md about them."""

from typing import Any, NamedTuple

import torch
import transformers as hf
from small_models import sharp
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

V = 96


class Verdict(NamedTuple):
    """The result of a level for some families.

    Attributes:
        served: "batches", "one prompt" or "refused".
        why: as in docs/models.md; "": no remark.
        message: pattern of the error; "": no error.
        families: their `model_type`, and variants in brackets.
    """

    served: str
    why: str
    message: str
    families: str

    @property
    def names(self) -> list[str]:
        return self.families.split()


TABLE = [
    Verdict(
        "batches",
        "",
        "",
        "afmoe apertus arcee aria_text axk1 beam bert bert-generation big_bird biogpt bitnet "
        "codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama doge dots1 "
        "electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma "
        "gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 "
        "gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe "
        "granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
        "hyperclovax jais2 jetmoe kolibri1 laguna llama longcat_flash megatron-bert mellum "
        "mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral "
        "modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe "
        "qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 "
        "vaultgemma xglm youtu",
    ),
    Verdict(
        "one prompt",
        "takes no position_ids",
        "takes no position_ids",
        "bart bigbird_pegasus blenderbot blenderbot-small bloom marian mbart mpt mvp pegasus "
        "plbart roformer trocr whisper",
    ),
    Verdict(
        "one prompt",
        "places tokens by their slot in the cache, or counts positions in its own way",
        "gives rows of different lengths other logits",
        "camembert data2vec-text falcon[alibi] gpt_neo moshi roberta roberta-prelayernorm "
        "xlm-roberta xlm-roberta-xl",
    ),
    Verdict("one prompt", "attention in chunks", "a RollbackCache is needed", "llama4_text"),
    Verdict(
        "one prompt",
        "encoder and decoder, with `encoder_input_ids`",
        "has one length for all rows",
        "led longt5 mt5 switch_transformers t5 umt5",
    ),
    Verdict(
        "batches",
        "recurrent state, alone or beside attention: checkpoints advance",
        "",
        "bailing_hybrid bamba falcon_h1 granitemoehybrid inkling_text inkling2_text "
        "inkling2_loop_text kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba2 nemotron_h olmo_hybrid "
        "qwen3_5_text qwen3_5_moe_text qwen3_next qwen4_exp_text zamba2",
    ),
    Verdict(
        "batches",
        "recurrent state beside attention: by checkpoints, behind which tokens are read again",
        "",
        "zaya",
    ),
    Verdict(
        "batches",
        "drops its state in passes of several tokens: token by token, so that it can only draft "
        "with a gain",
        "",
        "falcon_mamba jamba mamba recurrent_gemma zamba",
    ),
    Verdict(
        "batches",
        "keeps more than keys and values: checkpoints advance",
        "",
        "axk2 deepseek_v32 glm_moe_dsa hy_v4",
    ),
    Verdict(
        "batches",
        "keeps more than keys and values: by checkpoints, behind which tokens are read again",
        "",
        "deepseek_v4",
    ),
    Verdict(
        "refused",
        "keeps its state outside the cache of transformers",
        "to give the logits of one pass over the whole text.*does not",
        "minimax rwkv xlstm",
    ),
    Verdict(
        "refused",
        "several tokens behind a cache are not what they are in one pass",
        "to give the logits of one pass over the whole text.*does not",
        "cpmant openai-gpt reformer xlm xlnet",
    ),
]

# Releases of transformers before `AS_IN_TABLE` have these otherwise: the level's probe decides.
AS_IN_TABLE = (5, 23)
OTHERWISE_BEFORE = (
    *("big_bird", "ctrl", "doge", "gemma3n_text", "glm_moe_dsa", "megatron-bert", "moshi"),
    *("recurrent_gemma", "roformer"),
)

HEAD = ["| `model_type` | served | why |", "|---|---|---|"]


def table_rows() -> list[str]:
    """Return the rows of the table, one for each family, in the order of the alphabet."""
    verdicts = {name: verdict for verdict in TABLE for name in verdict.names}
    return [
        f"| {name.replace('[', ' [')} | {verdicts[name].served} | {verdicts[name].why} |"
        for name in sorted(verdicts)
    ]


# Arguments of all configurations that have the name.
_NAMES = {
    0: "pad_token_id",
    1: "bos_token_id n_shared_experts n_group topk_group encoder_layers",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_key_value_heads "
    "eos_token_id num_experts_per_tok linear_num_value_heads linear_num_key_heads type_vocab_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_experts num_local_experts n_routed_experts",
    8: "head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim rotary_dim d_head d_kv state_size "
    "sliding_window linear_key_head_dim linear_value_head_dim mamba_d_state",
    16: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
    "qk_head_dim",
    32: "hidden_size d_model n_embd hidden_dim word_embed_proj_dim embedding_size",
    48: "intermediate_size d_ff n_inner ffn_dim ffn_hidden_size dff decoder_ffn_dim "
    "encoder_ffn_dim",
    V: "vocab_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx",
}
_SMALL = {name: value for value, names in _NAMES.items() for name in names.split()}

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon[alibi]": {"alibi": True},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": 48,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": V,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
    },
    # A window that texts outgrow.
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "inkling2_text": {"unpadded_vocab_size": V},
    # Its first pass appends layers to the cache.
    "inkling2_loop_text": {
        "unpadded_vocab_size": V,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "n_layers_per_attn_res_block": 1,
        "loop_gate_rank": 4,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    **{
        family: {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 2,
        }
        for family in (
            *("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
            "qwen3_next",
        )
    },
    "nemotron_h": {
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
    },
    "reformer": {"axial_pos_embds": False},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
}


def config_of(family: str) -> Any | None:
    """A tiny configuration; None: this release of transformers does not have the family."""
    kind = family.partition("[")[0]
    try:
        default = hf.AutoConfig.for_model(kind)
    except ValueError:
        return None
    made = type(default)
    aliases: dict[str, str] = made.attribute_map
    names = set(default.to_dict()) | set(aliases)
    given = {name: value for name, value in _SMALL.items() if name in names}
    if "qk_rope_head_dim" in names:  # latent attention: one key for all heads, spread out
        given.pop("head_dim", None)
        given["num_key_value_heads"] = 4
    for alias, name in aliases.items():
        if alias in given and name in given:
            del given[alias]
    own = {name: value for name, value in _OWN.get(family, {}).items() if name in names}
    config = made(**{**given, **own})
    if getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    config.tie_word_embeddings = False  # tied random weights repeat their input
    return config


def model_of(family: str) -> Any | None:
    """Return a random model with varied greedy texts; None: transformers lacks the family."""
    config = config_of(family)
    if config is None:
        return None
    if config.is_encoder_decoder and family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return hf.AutoModelForSeq2SeqLM.from_config(config).eval()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).float().eval()
    for _ in range(8):
        if _varied(sharp(model)):
            break
    return model


@torch.no_grad()
def _varied(model: Any) -> bool:
    text = [5, 17, 80, 3, 3, 41]
    try:
        for _ in range(5):
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
    except (RuntimeError, ValueError, TypeError):  # of a family that cannot be asked like this
        return True
    return len(set(text[6:])) > 1
