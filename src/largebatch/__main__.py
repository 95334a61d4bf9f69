"""`python -m largebatch`, the same as the `largebatch` command."""

import sys

from largebatch.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
