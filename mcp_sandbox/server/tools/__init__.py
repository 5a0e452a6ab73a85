"""The tools, one file per family. Their docstrings are what the model reads."""
