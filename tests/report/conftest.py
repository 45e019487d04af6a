"""Plans and runs by hand for the tests of what is drawn."""

from __future__ import annotations

import sys
from pathlib import Path

# The plans by hand are those of the tests of plans.
sys.path.append(str(Path(__file__).parents[1] / "plan"))
