"""Skills in the protocol's own words: what clients see of them beside the tools.

`extension` is SEP-2640 (`skills/list`, `skills/get`, `resources/directory/read`), `resources` the
files behind `skill://` uris, `prompts` what a user may invoke and what arguments may be.
`disclosure` puts the catalogue into the instructions, `results` makes the tools' answers.
`changes` tells clients of edits. `visible` says whose catalogue a request sees, `answers` which
method is answered by what.
"""
