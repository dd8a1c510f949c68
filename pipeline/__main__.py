"""`python -m pipeline` is `headrace`."""

import sys

from pipeline.cli import main

sys.exit(main(sys.argv[1:]))
