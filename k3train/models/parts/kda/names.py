"""Published names of a KDA mixer's parameters (k3-facts 11.1, 11.3). Imports no JAX."""

from k3train.models.parts.kda.config import KDAConfig
from k3train.models.stored import Stored


def names(cfg: KDAConfig) -> dict[str, Stored]:
    """Our attribute to where it is stored, relative to the mixer."""
    gates = ("g_proj",) if cfg.output_gate == "full" else ("g_a_proj", "g_b_proj")
    linear = ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", *gates, "o_proj")
    if cfg.gate == "softplus":
        a_log = Stored("A_log", "a_log_4d")
    else:
        a_log = Stored("A_log", "a_log", cfg.a_log_stored_multiple)
    return {
        **{name: Stored(f"{name}.weight", "linear") for name in linear},
        **{f"{name}_conv": Stored(f"{name}_conv1d.weight", "conv") for name in "qkv"},
        "a_log": a_log,
        "dt_bias": Stored("dt_bias"),
        "o_norm": Stored("o_norm.weight"),
    }
