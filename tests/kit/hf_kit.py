"""Small models of Hugging Face, as config.json has them."""

import json
from pathlib import Path
from typing import Any

from tests.kit.data_kit import END, write_tokenizer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Its experts are one parameter, and a file of each their own; the router's bias is a buffer that is saved."""


def write_hf_folder(folder: Path, words: int = 300, **changes: Any) -> Path:
    """A small Llama without weights and its tokenizer, as `from_pretrained` reads them."""
    write_tokenizer(folder, words)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": words + 60} | changes))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder
