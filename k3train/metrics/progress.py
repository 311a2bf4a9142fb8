"""What the user watches: a live bar on a terminal, plain lines elsewhere. Imports no JAX.

``update`` stores a few numbers; drawing happens in rich's own thread a few times a second, so no step waits for it.
"""

import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from k3train.metrics.writers.base import Value

_REFRESH = 4  # redraws a second
_LEAST_PAUSE = 1.0  # seconds between plain lines


class Progress:
    """Progress of a run; use it as a context manager.

    Args:
      total: the run's last step.
      start: step the attempt begins from.
      every: plain lines come at multiples of this many steps, at most one a second; the last step's always does.
      console: where to draw; standard output by default.
      live: a redrawn bar (the default on a terminal) or plain lines.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        every: int = 1,
        *,
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console or Console(soft_wrap=True, highlight=False)
        self._total, self._step, self._every, self._clock = total, start, every, clock
        self._begin = clock()
        self._first: tuple[int, float] | None = None
        self._now, self._last_line = self._begin, -math.inf
        self._values: dict[str, Value] = {}
        is_live = self._console.is_terminal if live is None else live
        self._live = (
            Live(console=self._console, get_renderable=self._draw, refresh_per_second=_REFRESH) if is_live else None
        )

    def update(self, step: int, values: Mapping[str, Value]) -> None:
        """Say that ``step`` is done. Of ``values``, train/loss, train/loss_ema, perf/tokens_per_s and perf/mfu show;
        those not given keep their last value."""
        self._step, self._now = step, self._clock()
        self._values.update(values)
        if self._first is None:  # the first step compiles, so speed is measured from its end
            self._first = (step, self._now)
        if self._live is None:
            due = step % self._every == 0 and self._now - self._last_line >= _LEAST_PAUSE
            if due or step == self._total:
                self._last_line = self._now
                self._console.print(Text(self._line()))

    def print(self, text: str) -> None:
        """A line above the bar (or just a line)."""
        self._console.print(Text(text))

    def eta(self) -> float | None:
        """Seconds to the last step at the mean speed so far; None before the second step."""
        if self._first is None or self._step <= self._first[0]:
            return None
        return (self._now - self._first[1]) / (self._step - self._first[0]) * (self._total - self._step)

    def _fields(self) -> list[str]:
        loss, ema = self._values.get("train/loss"), self._values.get("train/loss_ema")
        eta = self.eta()
        return [
            f"loss {_number(loss, '.4f')}",
            f"ema {_number(ema, '.4f')}",
            f"{_short(self._values.get('perf/tokens_per_s'))} tok/s",
            f"mfu {_number(self._values.get('perf/mfu'), '.1%')}",
            f"eta {'-' if eta is None else _clock_text(eta)}",
            f"elapsed {_clock_text(self._clock() - self._begin)}",
        ]

    def _line(self) -> str:
        width = len(str(self._total))
        return "  ".join([f"step {self._step:>{width}}/{self._total}", *self._fields()])

    def _draw(self) -> Table:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1, min_width=8)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=max(self._total, 1), completed=self._step)
        grid.add_row(f"step {self._step}/{self._total}", bar, "  ".join(self._fields()))
        return grid

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)


def _number(value: Value, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) and math.isfinite(value) else "-"


def _short(value: Value) -> str:
    """``12.3k`` for 12345."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def _clock_text(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
