"""Real tokenizers of every build that models come with, trained on a few lines, for tests.

Each is trained once: another training may number the tokens in another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "user asks and assistant answers; system says what is what. Café naïve über straße",
    "numbers 1 22 333 4444 12345 and   spaces\n\nand lines\tand tabs",
    "def f(x):\n    return [x for x in range(10) if x % 2 == 0]\n",
] * 4
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im", "[INST]", "[/INST]"]
"""One is the begin of another one, so that the longest match matters."""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_level() -> Any:
    """As GPT-2, Llama 3 and Qwen: bytes, words by a regular expression, nothing around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _bpe(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


@cache
def byte_level_prefixed() -> Any:
    """With a space in front of each text, and of what follows each special token; a token at the begin."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    _bpe(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@cache
def metaspace(scheme: str) -> Any:
    """As Llama 2 and Mistral in their newer form: ▁ for a space; `scheme` says where one is added."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    _bpe(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


@cache
def prepended() -> Any:
    """As Llama 2 in its older form: a normalizer puts ▁ in front of each stretch of text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<s>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _bpe(tokenizer)


@cache
def unigram() -> Any:
    """As T5 and Gemma: the likeliest pieces of a whole stretch."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=MARKS, unk_token="<s>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def word_piece() -> Any:
    """As BERT: lower case, words, their parts; marks at both ends."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<s>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=MARKS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def hungry() -> Any:
    """Byte level, with added tokens that eat white space, that are looked for after normalization, or hold some."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<tool>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("brown fox", normalized=True), AddedToken("\n\n", normalized=False)])
    return tokenizer


def word_bound() -> Any:
    """Byte level, with an added token that stands between words only: such a text is not cut."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken("stop", single_word=True, normalized=False)])
    return tokenizer


BUILDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte level, prefixed": byte_level_prefixed,
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, never": lambda: metaspace("never"),
    "prepended": prepended,
    "unigram": unigram,
    "word piece": word_piece,
    "hungry": hungry,
    "word bound": word_bound,
}


def save(folder: Path, tokenizer: Any, *, template: str = CHATML, **config: Any) -> Path:
    """Writes a model's folder: `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _bpe(tokenizer: Any, **options: Any) -> Any:
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=MARKS, show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
