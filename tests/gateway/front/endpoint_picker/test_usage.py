"""Usage at the end of a response."""

from __future__ import annotations

import pytest

from kvscout_gateway.front.endpoint_picker.usage import Usage, usage_of

LAST = (
    b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":48}}}\n\n'
)
QUOTED = b'{"choices": [{"text": "\\"usage\\": {\\"prompt_tokens\\": 1}"}]'


@pytest.mark.parametrize(("tail", "usage"), [
    (LAST + b"data: [DONE]\n\n", Usage(64, 48)),
    (b'tokens":1}}\n\ndata: {"usage":null}\n\n' + LAST, Usage(64, 48)),
    (LAST + b'data: {"usage": {"prompt_tokens": 65}}\n\n', Usage(65, None)),
    (QUOTED + b', "usage": {"prompt_tokens": 9}, "x": 1}', Usage(9, None)),
    (b'{"usage": {"prompt_tokens": 9, "prompt_tokens_details": null}}', Usage(9, None)),
    (QUOTED + b"}", None),
    (b'{"usage": {"prompt_tokens": -1}}', None),
    (b'{"usage": {"prompt_tokens": true}}', None),
    (b'{"usage": {"prompt_tok', None),
    (b'{"usage": ' + b'{"a":' * 100_000, None),
    (b"\xff\xfe", None),
    (b"", None),
])  # fmt: skip
def test_the_last_usage_counts(tail: bytes, usage: Usage | None) -> None:
    assert usage_of(tail) == usage
