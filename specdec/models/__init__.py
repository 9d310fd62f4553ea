"""Models: loading, runner, attention plug, taps, kernels. The one package that knows transformers' model classes."""
