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
    file = tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8")
    try:
        with file:
            json.dump(value, file, indent=1)
        os.replace(file.name, path)  # Windows replaces no file by an open one.
    except OSError:
        os.unlink(file.name)
        raise
