"""A request's trace: through gateway, indexer and scheduler to its engine, with the facts of the decision."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from support.gateway_stack import MODEL, connected, fresh_prompt, together
from support.guarded_services import guarded_services
from support.otlp_receiver import Exported, otlp_receiver
from support.processes import eventually, running
from support.scripted_engine import begin, scripted_engine, send, send_tokens

from kvscout.ext_proc.v3 import ext_proc_pb2
from kvscout.v1 import gateway_pb2, indexer_pb2, workers_pb2
from kvscout_common.hashing import native_available
from kvscout_common.observability import tracing
from kvscout_common.transport import Transport
from kvscout_gateway.fronts.endpoint_picker.wire import SERVICE

BOTH = [Transport.GRPCIO, *([Transport.NATIVE] if native_available() else [])]
SERVER, CLIENT = 2, 3
INDEXER, SCHEDULER = "kvscout.v1.Indexer/FindMatches", "kvscout.v1.Scheduler/SelectAndReserve"
PARENTS = {
    f"kvscout-gateway {name}": parent
    for name, parent in (("find_matches", ""), ("select", ""), ("engine POST /v1/completions", ""))
} | {
    f"kvscout-indexer {INDEXER}": "kvscout-gateway find_matches",
    f"kvscout-scheduler {SCHEDULER}": "kvscout-gateway select",
}
"""Of each span below the one of its front: the one that it is part of; "" = the front's."""


async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """One token, and the usage."""
    response = await begin(request)
    await send_tokens(response, 1, finish="length")
    usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 48}}
    await send(response, choices=[], usage={**usage, "completion_tokens": 1})
    await response.write(b"data: [DONE]\n\n")
    return response


def begun_trace(*, sampled: bool = True) -> tuple[str, str, str]:
    """A caller's trace: its id, the caller's span, and what it sends."""
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-0{int(sampled)}"


@pytest.mark.parametrize("transport", BOTH)
async def test_a_request_is_one_trace_from_its_client_to_its_engine(transport: Transport, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with otlp_receiver() as receiver, scripted_engine(answers) as engine:
        carried = ("--rpc-transport", transport.value, *receiver.flags)
        async with together(running("kvscout_indexer.main", *carried), running("kvscout_scheduler.main", *carried)) as (
            indexer,
            scheduler,
        ):
            patience = ("--indexer-timeout-ms", "2000", "--scheduler-timeout-ms", "3000")
            helpers = ("--indexer", indexer.address, "--scheduler", scheduler.address, *patience)
            logs = ("--log-format", "json", "--log-level", "debug")
            async with AsyncExitStack() as stack:
                written = stack.enter_context(log.open("wb"))
                gateway = await stack.enter_async_context(
                    running("kvscout_gateway.main", *helpers, *carried, *logs, stderr=written)
                )
                client = await stack.enter_async_context(connected(gateway, scheduler, indexer))
                http = await stack.enter_async_context(aiohttp.ClientSession())
                await client.register(
                    workers_pb2.Worker(
                        worker_id="w", model=MODEL, block_size=16, engine=workers_pb2.ENGINE_KIND_VLLM,
                        http_endpoint=engine.url,
                    )
                )  # fmt: skip

                async def attached() -> bool:
                    return any(helper.stream_connected for helper in (await client.status()).helpers)

                await eventually(attached, what="the gateway's stream to the scheduler")
                prompt = list(fresh_prompt(64))
                trace, caller, header = begun_trace()
                metadata = (("traceparent", header),)
                asked = gateway_pb2.GenerateRequest(
                    model=MODEL, token_ids=prompt, stop_conditions=gateway_pb2.StopConditions(max_tokens=1)
                )
                request: Any = client.stub.Generate(asked, metadata=metadata, timeout=20)
                assert [message async for message in request]
                asked_alone, alone, header = begun_trace()
                find: Any = client.indexer.FindMatches
                await find(
                    indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt),
                    metadata=(("traceparent", header),),
                    timeout=20,
                )
                routed, router, header = begun_trace()
                route: Any = client.stub.Route
                await route(
                    gateway_pb2.RouteRequest(model=MODEL, token_ids=prompt),
                    metadata=(("traceparent", header),),
                    timeout=20,
                )
                url = f"http://127.0.0.1:{gateway.ready['http_port']}/v1/completions"
                over_http, http_caller, header = begun_trace()
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "stream": True}
                async with http.post(url, json=body, headers={"traceparent": header}) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                unwanted, _, header = begun_trace(sampled=False)
                async with http.post(url, json=body, headers={"traceparent": header}) as answer:
                    await answer.read()
                failing, _, header = begun_trace()
                body["model"] = "nobody's"
                async with http.post(url, json=body, headers={"traceparent": header}) as answer:
                    assert answer.status == 404
    spans = receiver.of(trace)
    front = spans["kvscout-gateway kvscout.v1.Gateway/Generate"]
    assert (front.parent, front.kind) == (caller, SERVER)
    is_one_trace(spans, front)
    spans = receiver.of(over_http)
    front = spans["kvscout-gateway POST /v1/completions"]
    assert (front.parent, front.kind, front.failed) == (http_caller, SERVER, False)
    is_one_trace(spans, front)
    assert front.facts["kvscout.model"] == MODEL
    assert receiver.of(unwanted) == {}
    # What services tell one another meanwhile, and what registers and asks for status, begins none.
    assert {span.trace for span in receiver.spans} == {trace, asked_alone, routed, over_http, failing}
    front = receiver.of(routed)["kvscout-gateway kvscout.v1.Gateway/Route"]
    assert (front.parent, front.facts["kvscout.model"], front.facts["kvscout.tenant"]) == (router, MODEL, "default")
    [found] = receiver.of(asked_alone).values()
    assert (found.name, found.parent, found.facts["kvscout.blocks"]) == (INDEXER, alone, 4)
    failed = receiver.of(failing)["kvscout-gateway POST /v1/completions"]
    assert (failed.failed, failed.facts["error.type"]) == (True, "NotFound")
    # Its engine was told of the gateway's span of it, each time, and of nothing that is not wanted.
    told = [headers["traceparent"].split("-") for headers in engine.headers]
    assert [one[1] for one in told[:2]] == [trace, over_http]
    assert told[1][2] == spans["kvscout-gateway engine POST /v1/completions"].id
    assert (told[2][1], told[2][3]) == (unwanted, "00")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["trace_id"] for line in lines if "trace_id" in line} <= {trace, routed, over_http, unwanted, failing}


def is_one_trace(spans: dict[str, Exported], front: Exported) -> None:
    """Each of its spans is part of the right one, and says what was decided."""
    for name, parent in PARENTS.items():
        assert spans[name].parent == (spans[parent] if parent else front).id, name
        assert not spans[name].failed, name
    found = spans[f"kvscout-indexer {INDEXER}"].facts
    assert (found["kvscout.model"], found["kvscout.blocks"], found["kvscout.longest_overlap_blocks"]) == (MODEL, 4, 0)
    for name in (f"kvscout-scheduler {SCHEDULER}", "kvscout-gateway select"):
        decided = spans[name].facts
        assert (decided["kvscout.worker"], decided["kvscout.isl_tokens"]) == ("w", 64)
        assert decided["kvscout.uncached_tokens"] == 64
    engine = spans["kvscout-gateway engine POST /v1/completions"]
    assert (engine.kind, engine.facts["kvscout.status"], engine.events) == (CLIENT, 200, ("first output",))
    assert (engine.facts["kvscout.prompt_tokens"], engine.facts["kvscout.cached_tokens"]) == (64, 48)


async def test_a_pick_is_part_of_its_proxys_trace() -> None:
    async with otlp_receiver() as receiver:
        stop = tracing.start("gateway", receiver.url, ratio=1.0, version="1")
        try:
            trace, caller, header = begun_trace()
            async with guarded_services(BOTH[-1], "gateway") as services:
                address = f"127.0.0.1:{services['gateway'].picker_port}"
                async with grpc.aio.insecure_channel(address) as channel:
                    make: Any = channel.stream_stream(
                        f"/{SERVICE}/Process",
                        request_serializer=ext_proc_pb2.ProcessingRequest.SerializeToString,
                        response_deserializer=ext_proc_pb2.ProcessingResponse.FromString,
                    )
                    running = make(metadata=(("authorization", "Bearer ours-client"),), timeout=20)
                    named = ext_proc_pb2.HeaderValue(key="traceparent", raw_value=header.encode())
                    headers = ext_proc_pb2.HttpHeaders(
                        headers=ext_proc_pb2.HeaderMap(headers=[named]), end_of_stream=True
                    )
                    await running.write(ext_proc_pb2.ProcessingRequest(request_headers=headers))
                    assert (await running.read()).immediate_response.status.code == 503  # there is no worker
                    running.cancel()
        finally:
            await asyncio.to_thread(stop)
    [span] = [one for one in receiver.spans if one.name == "pick"]
    assert (span.trace, span.parent, span.kind) == (trace, caller, SERVER)
    assert (span.failed, span.facts["error.type"]) == (True, "Unavailable")
