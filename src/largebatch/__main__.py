"""`python -m largebatch`, the same as the `largebatch` command."""

import sys

from largebatch.cli import main

sys.exit(main())
