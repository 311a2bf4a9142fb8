"""Published checkpoint names of our parameters, and the layout each is stored in. Imports no JAX.

A part's ``names.py`` maps its parameter names to :class:`Stored`; ``convert`` and the golden tests
read it. Arrays here are NumPy; ours are [in, out], published linear weights are [out, in].
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Stored:
    """Where one of our arrays lives in a published checkpoint.

    Attributes:
      name: published name; ``{expert}`` in it means one tensor an expert, stacked first in ours.
      layout: ``same``; ``linear`` [out, in]; ``conv`` [C, 1, W] for our [W, C]; ``row`` [1, D] for [D];
        ``a_log`` zero-padded to ``multiple``; ``a_log_4d`` [1, 1, H, 1].
      multiple: of ``a_log``.
    """

    name: str
    layout: Literal["same", "linear", "conv", "row", "a_log", "a_log_4d"] = "same"
    multiple: int = 0

    def under(self, prefix: str) -> "Stored":
        """The same array with ``prefix`` before its name."""
        return Stored(prefix + self.name, self.layout, self.multiple)

    def to_ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Published layout to ours (one expert's array where there are many).

        Raises:
          ValueError: where the array does not have the shape that ``shape`` asks for, or padding is not zero.
        """
        match self.layout:
            case "linear":
                out = array.T
            case "conv":
                out = array[:, 0, :].T
            case "row":
                out = array[0]
            case "a_log":
                if np.any(array[shape[0] :]):
                    raise ValueError(f"{self.name}: padding beyond {shape[0]} heads is not zero")
                out = array[: shape[0]]
            case "a_log_4d":
                out = array.reshape(-1)
            case _:
                out = array
        if out.shape != shape:
            raise ValueError(f"{self.name}: stored shape {array.shape} does not fit ours {shape}")
        return out

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """Our layout to the published one."""
        match self.layout:
            case "linear":
                return array.T
            case "conv":
                return array.T[:, None, :]
            case "row":
                return array[None]
            case "a_log":
                return np.pad(array, (0, -array.shape[0] % self.multiple)) if self.multiple else array
            case "a_log_4d":
                return array.reshape(1, 1, -1, 1)
            case _:
                return array
