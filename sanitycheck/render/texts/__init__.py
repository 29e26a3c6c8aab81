"""The words for every reason. Data, in one module per family of checks."""

from __future__ import annotations

from collections.abc import Mapping

from sanitycheck.reasons import Reason
from sanitycheck.render.texts.devices import DEVICES
from sanitycheck.render.texts.fleet import FLEET
from sanitycheck.render.texts.measures import MEASURES
from sanitycheck.render.texts.node import NODE
from sanitycheck.render.texts.wording import NOTHING, Text

__all__ = ["NOTHING", "TEXTS", "Text"]

TEXTS: Mapping[Reason, Text] = {**NODE, **DEVICES, **MEASURES, **FLEET}
