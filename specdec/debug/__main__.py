"""`python -m specdec.debug`: where a drafted run parts from the undrafted one."""

import typer

from specdec.debug.divergence import main

typer.run(main)
