"""Progress bars of long work.

In: what tqdm takes. Out: a bar, or lines in a file. Not here: what the library and the machine are (``info``).
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import auto

__all__ = ["tqdm"]

LOG_SECONDS = 60.0
"""Seconds between two lines of a progress bar in a file or a pipe."""


class tqdm(auto.tqdm):
    """A progress bar with the arguments of tqdm; in a file or a pipe it writes one line a minute."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        file = options.get("file") or sys.stderr
        interactive = "ipykernel" in sys.modules or (hasattr(file, "isatty") and file.isatty())
        self._every = 0.0 if interactive else LOG_SECONDS
        self._drawn: float | None = None
        intervals = {} if interactive else {"mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS}
        super().__init__(*arguments, **intervals | options)

    def refresh(self, *arguments: Any, **options: Any) -> Any:
        """Draw the bar, unless the last line in a file is recent."""
        if self.disable:  # such a bar has no clock
            return None
        now = self._time()
        if self._drawn is not None and now - self._drawn < self._every:
            return None
        self._drawn = now
        return super().refresh(*arguments, **options)
