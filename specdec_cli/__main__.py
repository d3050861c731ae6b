"""`python -m specdec_cli` is `specdec`."""

import sys

from specdec_cli.app import main

sys.exit(main())
