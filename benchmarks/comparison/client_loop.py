"""Runs `vllm bench serve` again and again in one process, so that vLLM is imported once. Runs under vLLM's own Python.

Reads one JSON list of arguments a line on standard input; answers each with one line, `ok` or `failed`, on what
standard output was at start. Everything that the client prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cli = importlib.import_module("vllm.entrypoints.cli.main")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        sys.argv = ["vllm", "bench", "serve", *json.loads(line)]
        answer = "ok"
        try:
            cli.main()
        except SystemExit as ended:
            answer = "failed" if ended.code else "ok"
        except Exception:
            traceback.print_exc()
            answer = "failed"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
