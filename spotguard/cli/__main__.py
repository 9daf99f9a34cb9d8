"""`python -m spotguard.cli` is `spotguard`."""

import sys

from spotguard.cli.main import main

sys.exit(main())
