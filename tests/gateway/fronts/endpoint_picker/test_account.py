"""What a response says at its end of the tokens it took."""

from __future__ import annotations

from typing import Any

import pytest

from kvscout_gateway.fronts.endpoint_picker.account import last_account

LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":48}}}\n\n'
)
FULL = {"prompt_tokens": 64, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}
QUOTED = b'{"choices": [{"text": "\\"usage\\": {\\"prompt_tokens\\": 1}"}]'


@pytest.mark.parametrize(("tail", "account"), [
    (LAST + b"data: [DONE]\n\n", FULL),
    (b'tokens":1}}\n\ndata: {"usage":null}\n\n' + LAST, FULL),
    (LAST + b'data: {"usage": {"prompt_tokens": 65}}\n\n', {"prompt_tokens": 65}),
    (QUOTED + b', "usage": {"prompt_tokens": 9}, "x": 1}', {"prompt_tokens": 9}),
    (QUOTED + b"}", {}),
    (b'{"usage": {"prompt_tok', {}),
    (b'{"usage": ' + b'{"a":' * 100_000, {}),
    (b"\xff\xfe", {}),
    (b"", {}),
])  # fmt: skip
def test_the_last_usage_counts(tail: bytes, account: dict[str, Any]) -> None:
    assert last_account(tail) == account
