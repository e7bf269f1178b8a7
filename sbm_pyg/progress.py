"""Progress bars: as tqdm draws them in a terminal or a notebook, and a line a minute in a file or a pipe.

In: what ``tqdm.auto.tqdm`` takes. Out: the bar. Not here: what is counted.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import auto

__all__ = ["tqdm"]

RARE = 60.0
"""Seconds between two lines where nobody watches, for whom each change is a new line."""


class tqdm(auto.tqdm):
    """A bar of tqdm that is drawn rarely where its file is no terminal. Arguments are those of tqdm."""

    def __init__(self, *given: Any, **options: Any) -> None:
        file = options.get("file") or sys.stderr
        watched = "ipykernel" in sys.modules or (hasattr(file, "isatty") and file.isatty())
        self._every = 0.0 if watched else RARE
        self._drawn: float | None = None
        super().__init__(*given, **({} if watched else {"mininterval": RARE, "maxinterval": RARE}) | options)

    def refresh(self, *given: Any, **options: Any) -> Any:
        """Draw the bar, unless it was drawn a moment ago and nobody watches."""
        if self.disable:  # such a bar has no clock
            return None
        now = self._time()
        if self._drawn is not None and now - self._drawn < self._every:
            return None
        self._drawn = now
        return super().refresh(*given, **options)
