"""`python -m specdec_cli` is `specdec`; what is interrupted while it begins ends like the rest."""

import os
import sys


def main() -> int:
    """Run the command line of this process; returns its exit code."""
    try:
        from specdec_cli.app import main as run
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            print('{"error": {"code": 130, "message": "interrupted", "hint": null}}', flush=True)
        print("error: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    return run()


if __name__ == "__main__":
    sys.exit(main())
