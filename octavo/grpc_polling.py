"""The thread in which an asyncio server of gRPC learns what the network has done. Knows gRPC's threads alone."""

from __future__ import annotations

import os
import threading


def let_polling_wait() -> int:
    """Make gRPC's polling thread wait for its turn on the processor; returns how many such threads there are.

    Every message that has been written wakes it. As a thread like any other it then takes the processor from the event
    loop, which is about to write the next one, and hands its news over one by one; as one for batch work it comes when
    the loop rests, and finds the news of many. Call it once gRPC's asyncio part is in use, for that starts the thread.
    Does nothing where the system knows no such threads.
    """
    threads = [thread for thread in threading.enumerate() if "_poll_wrapper" in thread.name]
    for thread in threads:
        if hasattr(os, "SCHED_BATCH") and thread.native_id is not None:
            os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
    return len(threads)
