"""Checks clients' grammars in processes of their own, each check bounded in time, so that none can stall the router.

Owns the processes, which it starts when the first grammar comes, and remembers its latest verdicts. Belongs to one
event loop. Raises `InvalidRequest` naming the request's field; knows nothing of what the grammars say.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import OrderedDict

from octavo.internal.v1 import types_pb2
from router.errors import Exhausted, InvalidRequest, Unavailable
from router.structured.spec import DEFAULT_TIMEOUT_S, GrammarKind, GrammarSpec, Thinking

NUM_PROCESSES = 2
MAX_VERDICTS = 512
MAX_VERDICTS_BYTES = 16 * 2**20
START_TIMEOUT_S = 30.0
_WIRE_KINDS = {
    GrammarKind.JSON_SCHEMA: types_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.REGEX: types_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.LARK: types_pb2.GRAMMAR_KIND_LARK,
    GrammarKind.EBNF: types_pb2.GRAMMAR_KIND_EBNF,
}


def with_thinking(grammar: types_pb2.Grammar, thinking: Thinking) -> types_pb2.Grammar:
    """A checked grammar behind thinking: that adds nothing of a client's, so it needs no check of its own."""
    found = types_pb2.Grammar(
        thinking=types_pb2.Thinking(
            opener=thinking.opener,
            closer=thinking.closer,
            opener_id=thinking.opener_id,
            closer_id=thinking.closer_id,
            is_open=thinking.is_open,
        )
    )
    found.MergeFrom(grammar)
    return found


class GrammarChecker:
    """`check` any number at a time; `close` when the router ends."""

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, max_bytes: int = MAX_VERDICTS_BYTES) -> None:
        """`max_bytes` bounds the remembered verdicts, which hold their grammars."""
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        # None stands for a process not started yet: it takes the place of one that was lost.
        self._idle: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put_nowait(None)
        self._live: set[_Process] = set()
        self._ending: set[_Process] = set()
        self._verdicts: OrderedDict[bytes, types_pb2.GrammarVerdict] = OrderedDict()
        self._num_bytes = 0

    @property
    def processes(self) -> tuple[_Process, ...]:
        """Those that check."""
        return tuple(self._live)

    @property
    def num_remembered(self) -> int:
        """Grammars that need not be compiled again."""
        return len(self._verdicts)

    async def check(self, spec: GrammarSpec) -> types_pb2.Grammar:
        """The grammar as workers take it.

        Raises InvalidRequest for one that cannot be compiled, Exhausted where checks are backed up for longer than one
        may last.
        """
        key = hashlib.sha256(f"{spec.kind.value}\0{spec.text}".encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._ask(types_pb2.Grammar(kind=_WIRE_KINDS[spec.kind], text=spec.text))
            if verdict is None:  # not remembered: the machine may have been busy
                raise InvalidRequest(
                    spec.field,
                    f"{spec.field} takes more time, memory or nesting to compile than is allowed "
                    f"({self._timeout_s:g} s, --grammar-timeout); simplify it",
                )
            self._remember(key, verdict)
        else:
            self._verdicts.move_to_end(key)
        if not verdict.HasField("grammar"):
            raise InvalidRequest(spec.field, f"{spec.field} cannot be enforced: {verdict.error}")
        return verdict.grammar

    def _remember(self, key: bytes, verdict: types_pb2.GrammarVerdict) -> None:
        if (known := self._verdicts.pop(key, None)) is not None:  # another request asked at the same time
            self._num_bytes -= known.ByteSize()
        self._verdicts[key] = verdict
        self._num_bytes += verdict.ByteSize()
        while len(self._verdicts) > MAX_VERDICTS or self._num_bytes > self._max_bytes:
            self._num_bytes -= self._verdicts.popitem(last=False)[1].ByteSize()

    async def close(self) -> None:
        """End the processes; returns when they have ended."""
        for process in self._live:
            process.kill()
        await asyncio.gather(*(process.wait() for process in self._live | self._ending))

    async def _ask(self, grammar: types_pb2.Grammar) -> types_pb2.GrammarVerdict | None:
        """The verdict of a process; None where it crashed or had no more time."""
        try:
            process = await asyncio.wait_for(self._idle.get(), self._timeout_s)
        except TimeoutError:
            raise Exhausted("checks of grammars are backed up", self._timeout_s) from None
        try:
            if process is not None and process.has_ended:  # from outside: no grammar is to blame
                self._live.discard(process)
                process = None
            if process is None:
                process = await _Process.start()
                self._live.add(process)
            verdict = await process.ask(grammar, self._timeout_s)
        except BaseException:  # also a cancellation: what the process says next would be taken for another's answer
            self._drop(process)
            raise
        if verdict is None:
            self._drop(process)
        else:
            self._idle.put_nowait(process)
        return verdict

    def _drop(self, process: _Process | None) -> None:
        if process is not None:
            process.kill()
            self._live.discard(process)
            self._ending = {ended for ended in self._ending if not ended.has_ended} | {process}
        self._idle.put_nowait(None)


class _Process:
    """One check process, ready for one grammar at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> _Process:
        """Raises Unavailable for one that does not come up."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        module = "router.structured.check_process"
        started = cls(
            await asyncio.create_subprocess_exec(sys.executable, "-m", module, stdin=pipe, stdout=pipe, stderr=null)
        )
        try:
            ready = await started._answer(START_TIMEOUT_S)
        except BaseException:
            started.kill()
            raise
        if ready is None:
            started.kill()
            raise Unavailable(f"grammars cannot be checked: the process {module} does not start")
        return started

    async def ask(self, grammar: types_pb2.Grammar, timeout_s: float) -> types_pb2.GrammarVerdict | None:
        """Its verdict; None for a process that crashed over it or did not answer in time."""
        data = grammar.SerializeToString()
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(4, "big") + data)
        return await self._answer(timeout_s)

    def kill(self) -> None:
        """End it, whatever it does."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        """Returns when it has ended."""
        await self._process.wait()

    async def _answer(self, timeout_s: float) -> types_pb2.GrammarVerdict | None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                size = int.from_bytes(await self._process.stdout.readexactly(4), "big")
                return types_pb2.GrammarVerdict.FromString(await self._process.stdout.readexactly(size))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            return None
