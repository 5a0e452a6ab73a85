"""Skills in the protocol's own words: what clients see of them beside the tools.

resources    the files behind `skill://` uris, and SEP-2640
prompts      what a user may invoke, and what arguments may be
results      the tools' answers
changes      tells clients of edits
visible      whose catalogue a request sees, and what of it is in the instructions
"""
