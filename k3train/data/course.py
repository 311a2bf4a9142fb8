"""How many rows of which length each step of a run takes, and where they lie. Imports neither JAX nor NumPy.

The position of a run is one integer: the nominal tokens of whole rows, S = ``data.sequence_length`` each, in the order
of the data. A stage of shorter rows (L, a divisor of S) takes every row in S / L parts, one after the other, so that no
token is read twice and the order is the same for every length: the row at position p is sample p div S from token
p mod S on. Where a stage begins, the position moves up to the next multiple of its length.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """What a step takes from some point of the run on."""

    tokens: int
    """Nominal tokens trained on at which the stage begins, with the next step."""
    rows: int
    """Rows of a step."""
    length: int
    """L, tokens of a row; divides S."""
    accumulation: int
    """Microbatches of a step."""


class Leg(NamedTuple):
    """Steps of one stage, one after the other."""

    step: int
    """Steps done before the first of them."""
    position: int
    """Where its first row lies."""
    tokens: int
    """Nominal tokens trained on before it."""
    rows: int
    length: int
    accumulation: int

    @property
    def step_tokens(self) -> int:
        """Nominal tokens of a step."""
        return self.rows * self.length

    @property
    def shape(self) -> tuple[int, int, int]:
        """What a train step is compiled for: rows, length and microbatches."""
        return self.rows, self.length, self.accumulation

    def position_after(self, step: int) -> int:
        """The position after ``step`` steps of the run, within the leg."""
        return self.position + (step - self.step) * self.step_tokens

    def tokens_after(self, step: int) -> int:
        """Nominal tokens trained on after ``step`` steps of the run, within the leg."""
        return self.tokens + (step - self.step) * self.step_tokens


class Course:
    """The legs of a run from some point on; pure functions of the number of steps done.

    A run that goes on somewhere takes the same course as one that came there from its beginning.

    Args:
      stages: in order; the first begins at 0 tokens.
      step, position, tokens: where the course begins.
    """

    def __init__(self, stages: Sequence[Stage], step: int = 0, position: int = 0, tokens: int = 0):
        self.stages = tuple(stages)
        legs: list[Leg] = []
        for number, stage in enumerate(self.stages):
            end = self.stages[number + 1].tokens if number + 1 < len(self.stages) else None
            if end is not None and end <= tokens:
                continue  # it was over before, or within the last step of the stage before it
            leg = Leg(step, -(-position // stage.length) * stage.length, tokens, *stage[1:])
            legs.append(leg)
            if end is not None:
                step += -(-(end - tokens) // leg.step_tokens)
                position, tokens = leg.position_after(step), leg.tokens_after(step)
        self.legs = tuple(legs)

    @classmethod
    def steady(cls, rows: int, length: int, sample: int = 0) -> "Course":
        """The course without stages: ``rows`` whole rows of ``length`` tokens a step, from a global sample on."""
        return cls([Stage(0, rows, length, 1)], position=sample * length)

    def leg(self, step: int) -> Leg:
        """The leg of the step that follows ``step`` steps."""
        found = self.legs[0]
        for leg in self.legs[1:]:
            if leg.step <= step:
                found = leg
        return found

    def rows_at(self, step: int) -> tuple[int, int, int]:
        """(position, rows, length) of the step that follows ``step`` steps."""
        leg = self.leg(step)
        return leg.position_after(step), leg.rows, leg.length

    def position(self, step: int) -> int:
        """Where the rows of ``step`` steps end."""
        start, rows, length = self.rows_at(step - 1) if step > self.legs[0].step else (self.legs[0].position, 0, 0)
        return start + rows * length

    def tokens(self, step: int) -> int:
        """Nominal tokens trained on after ``step`` steps."""
        return self.leg(max(step - 1, self.legs[0].step)).tokens_after(step)

    def steps_to(self, tokens: int) -> int:
        """Steps of the run after which ``tokens`` nominal tokens are trained on, or a few more."""
        leg = [leg for leg in self.legs if leg.tokens < tokens or leg is self.legs[0]][-1]
        return leg.step + max(0, -(-(tokens - leg.tokens) // leg.step_tokens))

    def steps_within(self, position: int) -> int:
        """The most steps of the run whose rows end at ``position`` or before."""
        leg = [leg for leg in self.legs if leg.position + leg.step_tokens <= position or leg is self.legs[0]][-1]
        steps = leg.step + max(0, (position - leg.position) // leg.step_tokens)
        following = [other.step for other in self.legs if other.step > leg.step]
        return min([steps, *following[:1]])
