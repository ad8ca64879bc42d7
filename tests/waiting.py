"""The one way in which tests wait: for a condition that stays once it holds, with a deadline against hanging.

Never for a moment that passes: a loaded machine would miss it. A deadline is no claim about speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 180.0
"""Long enough for a machine ten times slower than a laptop; shorter than pytest's own limit for a test."""


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """The condition's first true value; fails the test after `seconds`."""
    ends_at = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < ends_at, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return value
