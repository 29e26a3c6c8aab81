"""Reading a packaged YAML table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sanitycheck.errors import TableError

__all__ = ["DATA", "load_table"]

DATA = Path(__file__).resolve().parents[1] / "data"


def load_table(path: Path, *, version: int) -> Mapping[str, Any]:
    """The table of a file.

    Raises:
        TableError: It is missing, no YAML, no mapping, or of another version.
    """
    import yaml  # here, so that listing the checks does not pay for it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.load(file, Loader=loader)  # a safe one, in C where it exists
    except (OSError, yaml.YAMLError) as error:
        raise TableError(path.name, problem=str(error)) from error
    if not isinstance(data, Mapping) or data.get("version") != version:
        raise TableError(path.name, problem=f"expected a mapping with 'version: {version}'")
    return data
