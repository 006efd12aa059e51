"""The tokens of a prompt as its engine will see them, for routing only: what the engine gets is the client's own body.

::

    the body of a request ─┬─ token ids in it ──────────────────────────────────────────────▶ as they are
                           ├─ a tokenizer here ── as_chat.py: a chat completion; conversation.py, chat_template.py: text
                           │  (local_source.py)   tokenizer.py: cut by token_boundaries.py; chunk_cache.py: known chunks
                           └─ a renderer, the engine ── remote_source.py: what to ask; remote_tokens.py: 50 ms at most

`source.py` has their order, `prompt_tokens.py` asks one after the other, `parity.py` compares what came out with what
the engine had.
"""
