"""Who decides: tensor functions over TargetRows and Noise."""

if __name__ != "specdec.verifiers":
    raise ImportError("import specdec.verifiers, not verifiers")
