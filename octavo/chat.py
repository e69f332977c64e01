"""`octavo chat` and `octavo generate`: a conversation in the terminal, and one prompt, streamed over gRPC.

Knows terminals and the client. Answers go to standard output, everything else to standard error, so that a pipe gets
the answer alone. Ctrl-C cancels the answer that is being written; at the prompt, it ends the chat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from octavo.option_parsing import INT64, POSITIVE_INT32, number
from octavo.options import Limits

if TYPE_CHECKING:
    from octavo.client import DeltaStream, Options

DEFAULT_SERVER = "127.0.0.1:8001"

# What a chat asks for where its user says nothing. Small models lose the thread when sampled from the whole
# distribution, the default of the API; their authors advise values such as these.
CHAT_TEMPERATURE, CHAT_TOP_P = 0.2, 0.9

_HELP = """Commands:
  /reset         forget the conversation (the system message stays)
  /system TEXT   set the system message and forget the conversation; without TEXT, remove it
  /help          this text
  /quit          end; so does Ctrl-D
Ctrl-C stops the answer that is being written."""
_INTERRUPTED = 130


class Conversation:
    """The messages so far. A failed or cancelled turn leaves no half of itself behind."""

    def __init__(self, system: str = "") -> None:
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """What the server is sent, but for the next question."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def reset(self) -> None:
        """Forget the turns."""
        self._turns.clear()

    def set_system(self, text: str) -> None:
        """Start over under another system message; empty: none."""
        self._system = text
        self.reset()

    def with_question(self, text: str) -> list[dict[str, str]]:
        """The messages with the next question."""
        return [*self.messages, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """A turn is complete."""
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def add_parser(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of `chat` or `generate` to its parser."""
    parser.description = {
        "chat": "Chat with a served model in the terminal.",
        "generate": "Continue a prompt, and write what is generated to standard output.",
    }[name]
    if name == "generate":
        parser.add_argument("prompt", metavar="PROMPT", help="the prompt; `-` reads it from standard input")
    else:
        parser.add_argument("--message", metavar="TEXT", help="ask this alone, write the answer, and end")
        parser.add_argument("--system", metavar="TEXT", default="", help="system message of the conversation")
    parser.add_argument(
        "--server", metavar="HOST:PORT", default=DEFAULT_SERVER, help=f"a router's gRPC port (default {DEFAULT_SERVER})"
    )
    parser.add_argument("--tls", action="store_true", help="speak TLS; the API key is always that of OCTAVO_API_KEY")
    for file, help in (
        ("ca", "PEM certificates of the CA to trust in place of the system's; implies --tls"),
        ("cert", "PEM certificate chain to show the server, where it asks for one"),
        ("key", "PEM private key of --tls-cert"),
    ):
        parser.add_argument(f"--tls-{file}", metavar="FILE", help=help)
    parser.add_argument("--model", metavar="NAME", default="", help="served name of the model (default: the router's)")
    parser.add_argument("--max-tokens", type=number(int, POSITIVE_INT32), metavar="N", help="most tokens of an answer")
    temperature, top_p = (f" (default {CHAT_TEMPERATURE})", f" (default {CHAT_TOP_P})") if name == "chat" else ("", "")
    parser.add_argument(
        "--temperature",
        type=number(float, Limits(0, 2)),
        metavar="X",
        help=f"randomness in [0, 2]; 0 is greedy{temperature}",
    )
    parser.add_argument(
        "--top-p",
        type=number(float, Limits(above=0, maximum=1)),
        metavar="X",
        help=f"nucleus sampling, in (0, 1]{top_p}",
    )
    if name == "chat":
        parser.set_defaults(temperature=CHAT_TEMPERATURE, top_p=CHAT_TOP_P)
    parser.add_argument("--seed", type=number(int, INT64), metavar="N", help="makes answers repeatable")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")


def main(name: str, args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from octavo.client import Client, OctavoError, Tls

    speaks_tls = args.tls or args.tls_ca or args.tls_cert
    tls = Tls(args.tls_ca, args.tls_cert, args.tls_key) if speaks_tls else None
    try:
        opened = Client(args.server, model=args.model, tls=tls)
    except ValueError as error:
        print(f"octavo {name}: {error}", file=sys.stderr)
        return 1
    with opened as client:
        options = _options(args)
        try:
            if name == "generate":
                prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
                return _write_once(client.generate(prompt, stream=True, **options))
            if args.message is not None:
                messages = Conversation(args.system).with_question(args.message)
                return _write_once(client.chat(messages, stream=True, **options))
        except OctavoError as error:
            print(f"octavo {name}: {_explain(error, args.server)}", file=sys.stderr)
            return 1
        _say(
            f"Chatting with {args.server} at temperature {args.temperature:g}, top-p {args.top_p:g}. "
            "/help lists the commands."
        )
        conversation = Conversation(args.system)
        for line in _lines(sys.stdin):
            if line.startswith("/"):
                if not _obey(line, conversation):
                    break
                continue
            try:
                stream = client.chat(conversation.with_question(line), stream=True, **options)
                answer = _write(stream, sys.stdout)
            except OctavoError as error:
                _say(_explain(error, args.server))
                continue
            if answer is not None:
                conversation.add(line, answer)
    return 0


def _options(args: argparse.Namespace) -> Options:
    given: Options = {}
    for name in ("max_tokens", "temperature", "top_p", "seed", "stop"):
        value = getattr(args, name)
        if value is not None:
            given[name] = value
    return given


def _write_once(stream: DeltaStream) -> int:
    return _INTERRUPTED if _write(stream, sys.stdout) is None else 0


def _write(stream: DeltaStream, out: IO[str]) -> str | None:
    """Write an answer as it comes; all of it, or None when Ctrl-C cancelled it. Thinking goes to standard error."""
    text, thinks = "", False
    try:
        for delta in stream:
            if delta.reasoning:
                thinks = True
                print(delta.reasoning, end="", file=sys.stderr, flush=True)
            if thinks and delta.text:
                thinks = False
                _say("")
            text += delta.text
            out.write(delta.text)
            out.flush()
    except KeyboardInterrupt:
        stream.cancel()
        print(file=out, flush=True)
        _say("(stopped)")
        return None
    if not text.endswith("\n"):
        print(file=out, flush=True)
    return text


def _lines(source: IO[str]) -> Iterator[str]:
    """Lines that say something, until the end of input or Ctrl-C at the prompt."""
    is_terminal = source.isatty()
    while True:
        try:
            line = input("> ") if is_terminal else source.readline()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if not is_terminal and not line:
            return
        if line.strip():
            yield line.strip()


def _obey(line: str, conversation: Conversation) -> bool:
    """Carry out a command; False when it ends the chat."""
    command, _, rest = line.partition(" ")
    match command:
        case "/quit" | "/exit":
            return False
        case "/reset":
            conversation.reset()
            _say("(the conversation is forgotten)")
        case "/system":
            conversation.set_system(rest.strip())
            _say("(a new conversation, with this system message)" if rest.strip() else "(no system message)")
        case "/help":
            _say(_HELP)
        case _:
            _say(f"there is no command {command}; /help lists them")
    return True


def _explain(error: Exception, server: str) -> str:
    from octavo.client import Unavailable

    if isinstance(error, Unavailable):
        return f"{error} (server {server}; start one with `octavo serve`, or name it with --server)"
    return str(error)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
