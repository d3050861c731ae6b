"""`python -m specdec_cli` is `specdec`. A signal during the imports ends the process like a later
signal."""

import os
import sys

from specdec_cli.errors import ExitCode
from specdec_cli.signals import signals


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        with signals(is_last=False):
            from specdec_cli.app import main as run
    except (KeyboardInterrupt, SystemExit) as end:
        is_interrupt = isinstance(end, KeyboardInterrupt)
        code = int(ExitCode.SIGINT if is_interrupt else ExitCode.SIGTERM)
        message = "interrupted" if is_interrupt else "terminated"
        if "--json" in sys.argv:
            print(
                f'{{"error": {{"code": {code}, "message": "{message}", "hint": null}}}}', flush=True
            )
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(code)
    return run()


if __name__ == "__main__":
    sys.exit(main())
