"""The process that compiles clients' grammars for a router: frames of protobuf in and out, one at a time.

A grammar that makes the library crash, hang or take all memory does so here, where the router can end it. Knows nothing
but the grammar: no request, no model. Started by `checker`; ends when its input does.

A frame is a length of four bytes, big-endian, and a message: a Grammar in, a GrammarVerdict out. The first frame out is
an empty verdict: ready.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from octavo.grammars import GrammarError, compile_grammar, make_vocabulary
from octavo.internal.v1 import types_pb2

MAX_MEMORY_BYTES = 2 * 2**30
STACK_BYTES = 4 * 2**20
MAX_ERROR_CHARS = 400
MAX_LOCATING_COMPILATIONS = 200
# Grammars of tool calls name special tokens by id; no vocabulary in use has more.
_NUM_TOKEN_IDS = 2**18


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the router's to handle
    # What overflows a worker's stack must overflow this smaller one first.
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    vocabulary = byte_vocabulary()
    _write(sink, types_pb2.GrammarVerdict())
    while (data := _read(source)) is not None:
        _write(sink, check(vocabulary, types_pb2.Grammar.FromString(data)))


def byte_vocabulary() -> LLTokenizer:
    """The 256 bytes as tokens: it can say any text, so that what no model could say is told from what one cannot."""
    tokens = [bytes([value]) for value in range(256)] + [b""] * (_NUM_TOKEN_IDS - 256)
    return make_vocabulary(tokens, [256], [256], lambda text: list(text.encode()))


def check(vocabulary: LLTokenizer, grammar: types_pb2.Grammar) -> types_pb2.GrammarVerdict:
    """Compiles it and takes the first step."""
    try:
        resolved = _without_ebnf(grammar)
        matcher = compile_grammar(vocabulary, resolved)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError("it allows no text at all, or is too complex to follow")
    except GrammarError as error:
        place = ""
        if grammar.kind == types_pb2.GRAMMAR_KIND_JSON_SCHEMA:
            place = locate(vocabulary, json.loads(grammar.text), str(error))
        return types_pb2.GrammarVerdict(error=(f"at {place}: " if place else "") + explain(str(error)))
    return types_pb2.GrammarVerdict(grammar=resolved)


def locate(vocabulary: LLTokenizer, schema: object, error: str) -> str:
    """The JSON pointer of the innermost part of a schema that has the same error by itself; "" for the whole."""
    budget = iter(range(MAX_LOCATING_COMPILATIONS))

    def has_it(part: Mapping[str, object]) -> bool:
        if next(budget, None) is None:
            return False
        text = json.dumps(part)
        try:
            compile_grammar(vocabulary, types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_JSON_SCHEMA, text=text))
        except GrammarError as found:
            return str(found) == error
        return False

    pointer = ""
    while found := next(((step, part) for step, part in _parts(schema) if has_it(part)), None):
        step, schema = found
        pointer += step
    return pointer


def _parts(schema: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Schemas directly inside a schema, with their pointers in it: keywords' values, and those of maps and lists."""
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for name, part in inner:
            if isinstance(part, Mapping):
                yield f"/{_escaped(keyword)}/{_escaped(str(name))}", part
        if isinstance(value, Mapping):
            yield f"/{_escaped(keyword)}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def explain(error: str) -> str:
    """The library's words, without its drawings, cut to a length; a regex's error with the character it is at."""
    if at := re.search(r"^ *(?P<blanks> *)\^+\nerror: (?P<what>.*)$", error, re.MULTILINE):
        # The regex library shows the pattern indented by four, and a caret below what it stumbles over.
        column = len(at.group(0).split("^")[0]) - 4
        return f"{at.group('what')}, at character {column}"[:MAX_ERROR_CHARS]
    if at := re.match(r"at (\d+)\((\d+)\): (.*)", error):
        return f"line {at[1]}, column {at[2]}: {at[3]}"[:MAX_ERROR_CHARS]
    if not error or error.startswith("panic"):
        return "it cannot be compiled"
    return error.splitlines()[0][:MAX_ERROR_CHARS]


def _without_ebnf(grammar: types_pb2.Grammar) -> types_pb2.Grammar:
    if grammar.kind != types_pb2.GRAMMAR_KIND_EBNF:
        return grammar
    try:
        text = any_to_lark(grammar.text)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # the converter's own error has no common base
        raise GrammarError(str(error)) from None
    return types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_LARK, text=text)


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    data = source.read(size)
    return data if len(data) == size else None


def _write(sink: BinaryIO, verdict: types_pb2.GrammarVerdict) -> None:
    data = verdict.SerializeToString()
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()


if __name__ == "__main__":
    main()
