"""The tools, one file per family. Their docstrings are what the model reads.

`code` runs something; `files`; `skills`; `sandbox` is about the computer: its processes, previews,
network access and reset.
"""
