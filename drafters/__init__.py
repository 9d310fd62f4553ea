"""Who proposes: one file or folder per method, never importing another method."""

if __name__ != "specdec.drafters":
    raise ImportError("import specdec.drafters, not drafters")
