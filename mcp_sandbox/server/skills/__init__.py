"""Skills in the protocol's own words: what clients see of them beside the tools.

`resources` has the files behind `skill://` uris and SEP-2640 (`skills/list`, `skills/get`,
`resources/directory/read`), `prompts` what a user may invoke and what arguments may be.
`disclosure` puts the catalogue into the instructions, `results` makes the tools' answers.
`changes` tells clients of edits. `visible` says whose catalogue a request sees.
"""
