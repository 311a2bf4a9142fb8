"""k3train: pretrain models of the Kimi K3 family in JAX."""

__version__ = "0.1.0"
