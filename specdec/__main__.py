"""`python -m specdec`: the `specdec` command."""

from specdec.cli import app

if __name__ == "__main__":
    app(prog_name="specdec")
