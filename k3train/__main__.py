"""``python -m k3train``."""

from k3train.cli.main import entry

if __name__ == "__main__":
    entry()
