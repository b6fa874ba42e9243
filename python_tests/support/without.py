"""A plugin of pytest (``-p without``): packages named in POLYSPEC_WITHOUT cannot be imported."""

import os
import sys
from typing import Any

# Both `import` and `importlib.util.find_spec` take None for a package that is not there.
ABSENT: dict[str, Any] = dict.fromkeys(os.environ.get("POLYSPEC_WITHOUT", "").split())
sys.modules.update(ABSENT)
