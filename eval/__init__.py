"""What it buys: one runner, thin entry points. Nobody imports eval."""

if __name__ != "specdec.eval":
    raise ImportError("import specdec.eval, not eval")
