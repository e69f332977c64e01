"""Octavo's start on the default model to its first token over HTTP, cold and with the GGUF file converted.

    python -m benchmarks.bench_start [--runs 3] [--json FILE]

One cold start, then `--runs` cached ones, of which the fastest counts. CPU seconds of each process stand beside: they
depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.comparison.serving import StartError
from benchmarks.comparison.starts import Start, fresh_cache, measure_start

TIMEOUT_S = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="cached starts (default: 3)")
    parser.add_argument("--json", type=Path, help="write every start to this file")
    options = parser.parse_args()
    starts: list[tuple[str, Start]] = []
    with tempfile.TemporaryDirectory(prefix="octavo-start-") as name:
        folder = Path(name)
        cache = fresh_cache(folder)
        try:
            for kind in ("cold", *("cached",) * options.runs):
                starts.append((kind, measure_start(cache, folder / "serve.log", TIMEOUT_S)))
                print(_line(*starts[-1]), flush=True)
        except StartError as error:
            sys.exit(str(error))
    fastest = min((start for kind, start in starts if kind == "cached"), key=lambda start: start.first_token_s)
    print(f"fastest cached start: {fastest.first_token_s:.2f} s")
    if options.json is not None:
        found = [{"kind": kind, **asdict(start)} for kind, start in starts]
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _line(kind: str, start: Start) -> str:
    each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(start.cpu_s.items()))
    return f"{kind:<6} {start.first_token_s:6.2f} s; CPU seconds: {each}, in all {sum(start.cpu_s.values()):.2f}"


if __name__ == "__main__":
    main()
