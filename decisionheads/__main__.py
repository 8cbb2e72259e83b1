"""`python -m decisionheads`, as `accelerate launch` and `torchrun` start it."""

from .cli import entry

if __name__ == "__main__":
    entry()
