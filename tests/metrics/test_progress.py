"""Plain lines and the live bar."""

import io
import math

import pytest
from rich.console import Console

from k3train.metrics.progress import Progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def run(live, steps, seconds, every=1, total=None, width=150):
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=live, width=width, soft_wrap=not live, highlight=False)
    with Progress(total or steps, every=every, console=console, live=live, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds
            progress.update(
                step,
                {"train/loss": 4 - step / 8, "train/loss_ema": math.nan if step == 1 else 3.5,
                 "perf/tokens_per_s": 12345.6, "perf/mfu": None if step < 4 else 0.4123},
            )  # fmt: skip
            if step == 2:
                progress.print("saved checkpoint 2")
    return out.getvalue()


def test_plain_lines():
    assert run(False, 4, 30.0, total=400) == (
        "step   1/400  loss 3.8750  ema -  12.3k tok/s  mfu -  eta -  elapsed 0:30\n"
        "step   2/400  loss 3.7500  ema 3.5000  12.3k tok/s  mfu -  eta 3:19:00  elapsed 1:00\n"
        "saved checkpoint 2\n"
        "step   3/400  loss 3.6250  ema 3.5000  12.3k tok/s  mfu -  eta 3:18:30  elapsed 1:30\n"
        "step   4/400  loss 3.5000  ema 3.5000  12.3k tok/s  mfu 41.2%  eta 3:18:00  elapsed 2:00\n"
    )


@pytest.mark.parametrize(
    "seconds, every, shown", [(0.25, 1, [1, 5, 9, 10]), (1.0, 4, [4, 8, 10]), (0.3, 4, [4, 8, 10])]
)
def test_plain_lines_are_not_too_many(seconds, every, shown):
    lines = [line for line in run(False, 10, seconds, every).splitlines() if line.startswith("step")]
    assert [int(line.split()[1].split("/")[0]) for line in lines] == shown


def test_a_plain_line_is_never_wrapped_or_marked_up():
    out = io.StringIO()
    console = Console(file=out, width=20, soft_wrap=True, highlight=False)
    with Progress(3, console=console) as progress:
        progress.print("[bold] " + "x" * 60)
    assert out.getvalue() == "[bold] " + "x" * 60 + "\n"


def test_the_live_bar_draws_the_last_step():
    text = run(True, 4, 30.0)
    assert "step 4/4" in text and "mfu 41.2%" in text and "saved checkpoint 2" in text
