"""Files that several processes may write concurrently."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically, and create the directory.

    Raises:
        OSError: If the file cannot be written; an earlier one is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            json.dump(value, file, indent=1)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
