"""The catalogue of incidents, and the diagnosis that picks from it.

An incident says how it shows (`seen`), which page helps, what is safe to do next and whether a restart may help.
`diagnose` takes everything that was read about a run (`Evidence`) and names the best match with its proof.
"""

from __future__ import annotations

from dflash_ops.incidents.catalogue import CATALOGUE
from dflash_ops.incidents.diagnosis import Diagnosis, NoMatch, diagnose
from dflash_ops.incidents.evidence import Evidence, Excerpt, Line, Source
from dflash_ops.incidents.signature import Incident, Signature

__all__ = [
    "CATALOGUE",
    "Diagnosis",
    "Evidence",
    "Excerpt",
    "Incident",
    "Line",
    "NoMatch",
    "Signature",
    "Source",
    "diagnose",
]
