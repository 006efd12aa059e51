"""Words to token ids and back."""

from __future__ import annotations

from kvscout_mocker.tokens.tokenizer import RESERVED_TOKENS, WordTokenizer

TOKENIZER = WordTokenizer(vocab_size=100)


def test_generated_text_comes_back_as_the_generated_tokens() -> None:
    tokens = list(range(RESERVED_TOKENS, 100))
    assert TOKENIZER.encode(TOKENIZER.decode(tokens)).tolist() == tokens


def test_words_are_deterministic_and_never_special() -> None:
    words = [f"word{i}" for i in range(500)] + ["w3", "w100", "w007"]
    tokens = TOKENIZER.encode(" ".join(words)).tolist()
    assert tokens == TOKENIZER.encode("  \n".join(words)).tolist()
    assert all(RESERVED_TOKENS <= token < 100 for token in tokens)


def test_a_chat_marks_roles_and_opens_the_assistants_turn() -> None:
    chat = [("system", "w10"), ("user", "w11 w12")]
    assert TOKENIZER.encode_chat(chat).tolist() == [6, 10, 7, 4, 11, 12, 7, 5]
    assert TOKENIZER.encode_chat(chat, add_generation_prompt=False).tolist() == [6, 10, 7, 4, 11, 12, 7]
