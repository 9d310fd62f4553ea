"""Learned drafting heads as plain modules: their parameters, one forward for training and inference, their files."""
