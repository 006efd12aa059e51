"""The tokens of a prompt as its engine will see them, for routing only: what the engine gets is the client's own body.

::

    the body of a request ─┬─ token ids in it ──────────────────────────────────────────────▶ as they are
                           ├─ a tokenizer here ── conversation.py, chat_template.py: text
                           │                      tokenizer.py: cut by token_boundaries.py; chunk_cache.py: known chunks
                           └─ the engine's /tokenize ── engine_tokenize.py: 50 ms at most

`prompt_tokens.py` chooses among them, `parity.py` compares what came out with what the engine had.
"""
