"""Fields of an object as its client wrote them."""

from __future__ import annotations

import json

from kvscout_common.http.json_fields import Fields


def test_some_of_the_fields_are_written_as_they_came() -> None:
    data = b'{"model" : "m", "messages":[ {"a": 1.50} ],\n"t\\u006f\\u006fls":null, "x":1}'
    fields = Fields.scanned(data)
    assert fields.written(("messages", "nothing", "model")) == b'"messages":[ {"a": 1.50} ],"model" : "m"'
    assert fields.written(("nothing",)) == b""
    assert json.loads(b"{" + fields.written(fields.places) + b"}") == json.loads(data)
