"""Finding out why: traces of runs read back, and the first token at which drafting changed an output."""
