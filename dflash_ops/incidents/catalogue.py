"""Every incident that the tool knows."""

from __future__ import annotations

from dflash_ops.incidents.place import ENVIRONMENT, REACH
from dflash_ops.incidents.signature import Incident
from dflash_ops.incidents.training import COMPILATION, MEMORY_AND_NUMBERS

CATALOGUE: tuple[Incident, ...] = COMPILATION + MEMORY_AND_NUMBERS + ENVIRONMENT + REACH
