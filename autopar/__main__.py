"""``python -m autopar``: the command line."""

from autopar.cli import start

if __name__ == "__main__":
    start()
