"""The fake as a process that a command line starts, as of vLLM (the options of 0.25.1) or SGLang.

The environment's FAKE has, as JSON, what to do wrong: refuse (a k), die (a k, after so many
requests), never (a k that is never healthy), key (the key that it wants), other (a k whose texts
differ), round_s (seconds of a round), child (a file for the process id of a child in a session of
its own) and stubborn (SIGTERM is ignored).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.server.fake_server import FakeServer

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def main() -> None:
    kind, *words = sys.argv[1:]
    parser = argparse.ArgumentParser(prog=kind)
    known = ["--host", "--port", "--dtype", "--extra"]
    known += {
        "vllm": ["--model", "--tensor-parallel-size", "--speculative-config"],
        "sglang": [
            *("--model-path", "--tp-size", "--speculative-algorithm", "--speculative-num-steps"),
            *("--speculative-eagle-topk", "--speculative-num-draft-tokens"),
            *("--speculative-draft-model-path", "--max-running-requests"),
        ],
    }[kind]
    for name in known:
        parser.add_argument(name)
    for name in {"vllm": ["--no-enable-prefix-caching"], "sglang": ["--disable-radix-cache"]}[kind]:
        parser.add_argument(name, action="store_true", required=True)
    asked = parser.parse_args(words)
    wrong = json.loads(os.environ.get("FAKE", "{}"))
    if kind == "vllm":
        k = json.loads(asked.speculative_config or "{}").get("num_speculative_tokens", 0)
    else:
        k = int(asked.speculative_num_draft_tokens or 1) - 1
    if wrong.get("refuse") == k:
        sys.exit(f"this k is refused: {k}")
    if "child" in wrong:
        child = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        with open(wrong["child"], "a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
    if wrong.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = FakeServer(kind, k, health=503 if wrong.get("never") == k else 200)
    server.key = wrong.get("key")
    if kind == "sglang":
        server.algorithm = asked.speculative_algorithm or ""
    server.faults.other_text = wrong.get("other") == k
    server.round_s = wrong.get("round_s", server.round_s)
    app = server.app()

    @web.middleware
    async def counted(request: web.Request, handler: object) -> web.StreamResponse:
        if wrong.get("die", [None])[0] == k and server.asked >= wrong["die"][1]:
            print("a planted death", flush=True)
            os._exit(9)
        return await handler(request)  # type: ignore[operator, no-any-return]

    app.middlewares.append(counted)
    web.run_app(
        app,
        host=asked.host,
        port=int(asked.port),
        print=lambda *_: None,
        handle_signals=not wrong.get("stubborn"),
        shutdown_timeout=0.1,
    )


main()
