"""The client of servers at a rate: how late requests leave it, and its processor time for each.

The tests' server runs in its own process, and answers short completions. Run this on a machine
without other work; the machine's load is printed too.

    python scripts/proofs/client.py [--rate 200] [--seconds 6]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from specdec_cli.backends.server.backend import ServerBackend
from specdec_cli.backends.server.client import Limits
from specdec_cli.backends.server.process import HOST, free_port
from specdec_cli.backends.server.session import Line, ServerSession
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.errors import SpecdecError
from specdec_cli.experiment.load.arrivals import process_of
from specdec_cli.experiment.load.measuring import Stream
from specdec_cli.recipe import load_recipe

_FAKE = Path(__file__).parents[2] / "tests" / "server" / "fake_process.py"
_PROMPT, _TOKENS, _ROUND_S = 32, 16, 0.005


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    asked, port = parser.parse_args(), free_port()
    words = [sys.executable, str(_FAKE), "vllm", "--host", HOST, "--port", str(port)]
    words += ["--no-enable-prefix-caching", "--speculative-config", '{"num_speculative_tokens": 3}']
    env = os.environ | {"FAKE": json.dumps({"round_s": _ROUND_S})}
    with subprocess.Popen(words, env=env) as server, ServerBackend() as backend:
        try:
            facts = None
            while facts is None:
                time.sleep(0.2)
                try:
                    facts = backend.look(f"http://{HOST}:{port}", load_recipe("demo"))
                except SpecdecError:
                    assert server.poll() is None, "the server has ended"
            session = ServerSession({3: facts}, 0, 512, 4096, Limits(60.0, 0), (), Line())
            _measure(session, asked.rate, round(asked.rate * asked.seconds))
            session.line.close()
        finally:
            server.terminate()


def _measure(session: ServerSession, rate: float, count: int) -> None:
    prompts = [Request(0, tuple(range(20, 20 + _PROMPT)))]
    stream = Stream(prompts, process_of("poisson"), rate, count, seed=0)
    params = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
    began, processor = time.perf_counter(), time.process_time()
    found = session.arrive(stream, 3, params, lambda: None)
    spent, whole = time.process_time() - processor, time.perf_counter() - began
    assert all(one.error is None for one in found)
    lags = [one.served.send_lag_ms or 0.0 for one in found if one.served is not None]
    p50, p99 = np.percentile(lags, (50, 99))
    print(
        f"{rate:g} requests/s, {len(found)} of them in {whole:.1f} s: left late by {p50:.1f} ms "
        f"(p50) and {p99:.1f} ms (p99); {1e3 * spent / len(found):.2f} ms of processor a request; "
        f"the machine's load is {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )


if __name__ == "__main__":
    main()
