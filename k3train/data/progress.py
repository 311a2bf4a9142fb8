"""The progress bar of a prepare: moving on a terminal, absent elsewhere. Imports no JAX."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from k3train.data.build import Progress as Reading

_PERIOD_S = 0.1


class ReadingBar:
    """Context manager whose ``update`` and ``say`` go into ``prepare``; writes to standard error.

    The bar appears with the first ``update``: a store that is there already shows none.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        columns = (
            TextColumn("reading"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[documents]} documents"),
        )
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task("reading", total=None, documents=0)
        self._shown = 0.0

    def __enter__(self) -> "ReadingBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, soft_wrap=True, markup=False)

    def update(self, reading: Reading) -> None:
        """Show how far the reading is; cheap enough for every record."""
        now = time.monotonic()
        if now - self._shown >= _PERIOD_S or reading.bytes_done == reading.bytes_total:
            self._shown = now
            self._progress.start()
            self._progress.update(
                self._task, completed=reading.bytes_done, total=reading.bytes_total, documents=reading.documents
            )
