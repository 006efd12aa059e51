"""A few seconds of what `make fuzz` does for hours. `KVSCOUT_TEST_SEED` reruns a seed."""

from __future__ import annotations

import os
import random

import pytest
from google.protobuf.descriptor import FieldDescriptor
from support.decoder_fuzz import Decoder, Queries, decoders, fuzz
from support.seeds import test_seed

from kvscout.v1 import indexer_pb2
from kvscout_common.hashing import native_available

SEED = test_seed()
CASES = int(os.environ.get("KVSCOUT_FUZZ_CASES", "3000"))


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [pytest.param(decoder, id=name) for name, decoder in decoders().items()])
def test_damaged_bytes_are_read_or_refused_and_twins_agree(decoder: Decoder) -> None:
    fuzz(decoder, random.Random(SEED), CASES)


@pytest.mark.skipif(not native_available(), reason="the extension is not built: it is what is tested")
def test_every_text_of_a_query_is_checked_also_what_only_python_reads() -> None:
    queries = Queries()
    fields = indexer_pb2.FindMatchesRequest.DESCRIPTOR.fields
    texts = [field for field in fields if field.type == FieldDescriptor.TYPE_STRING]
    assert len(texts) > 3
    for field in texts:
        request = indexer_pb2.FindMatchesRequest()
        setattr(request, field.name, "x")
        queries.check(request.SerializeToString()[:-1] + b"\xff")


@pytest.mark.skipif(not native_available(), reason="the extension is not built: it is what is tested")
def test_an_early_exit_may_end_below_what_the_reference_finds() -> None:
    request = indexer_pb2.FindMatchesRequest(model="m", token_ids=[*range(19), 2013265939], early_exit=True)
    Queries().check(request.SerializeToString())
