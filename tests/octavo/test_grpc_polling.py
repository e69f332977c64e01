"""gRPC's polling thread is found under the name that this version of gRPC gives it, and waits for its turn."""

from __future__ import annotations

import asyncio
import os
import threading

import grpc.aio
import pytest

from octavo.grpc_polling import let_polling_wait

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no threads for batch work")


def test_the_thread_of_a_server_waits_and_the_others_do_not() -> None:
    async def policies() -> tuple[int, list[int]]:
        server = grpc.aio.server()
        try:
            await server.start()
            count = let_polling_wait()
            ids = [thread.native_id for thread in threading.enumerate() if thread is not threading.main_thread()]
            return count, [os.sched_getscheduler(thread_id) for thread_id in ids if thread_id is not None]
        finally:
            await server.stop(None)

    count, found = asyncio.run(policies())
    assert count == 1
    assert found.count(os.SCHED_BATCH) == 1
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
