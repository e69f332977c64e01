"""A grpc.aio server with nothing behind it: at every step it writes the same bytes on every open stream.

What a message costs here is the part of a router's cost that is gRPC's, and no router can be below it; its polling
thread is set as a router's is. Run by `bench_router`; prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from octavo.grpc_polling import let_polling_wait
from octavo.v1 import inference_pb2

METHOD = "/bare.Bare/Stream"
RESPONSE = inference_pb2.GenerateResponse(
    request_id="0" * 24,
    model="tiny",
    delta=inference_pb2.Delta(text=" w0001", start_index=1000, token_ids=[1000]),
).SerializeToString()
"""What a router sends with most tokens."""


async def serve(num_streams: int, step_ms: float) -> None:
    """Write once so many streams are open, until cancelled."""
    waiting: list[asyncio.Future[None]] = []
    loop = asyncio.get_running_loop()

    async def call(request: bytes, context: Any) -> None:
        while True:
            step = loop.create_future()
            waiting.append(step)
            await step
            await context.write(RESPONSE)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.unary_stream_rpc_method_handler(call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", {"Stream": handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    let_polling_wait()
    due = loop.time()
    while True:
        if len(waiting) >= num_streams:
            steps, waiting[:] = waiting[:], []
            for step in steps:
                step.set_result(None)
        due = max(due + step_ms / 1000, loop.time())
        await asyncio.sleep(due - loop.time())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2])))
