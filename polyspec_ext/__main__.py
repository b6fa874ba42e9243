"""``python -m polyspec_ext``."""

import sys

from .cli import main

sys.exit(main())
