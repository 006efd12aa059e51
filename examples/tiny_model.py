"""Writes a tiny Llama model directory for an engine's `--load-format dummy`: random weights, no download.

    python tiny_model.py DIR

The tokenizer knows the words w0 … w4087, one token each, so that a text of words is a list of token ids. Needs the
package `tokenizers`, which every vLLM installation has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
VOCABULARY = 4096
WORDS = [*SPECIAL_TOKENS, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL_TOKENS)))]
"""By token id."""

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHAT_TEMPLATE = (
    "{% for t in tools or [] %}<|system|> {{ t.function.name }} {{ t.function.description }} "
    "{{ t.function.parameters | tojson }} <|end|> {% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] or '' }} "
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }} {% endfor %}"
    "<|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path) -> None:
    """Writes config, tokenizer and chat template into a folder."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(MODEL, indent=1))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "pad_token": "<pad>",
                "model_max_length": MODEL["max_position_embeddings"],
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: tiny_model.py DIR")
    write_model(Path(sys.argv[1]))
