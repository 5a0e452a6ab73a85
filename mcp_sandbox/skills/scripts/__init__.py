"""What bundled scripts use, found by reading them: imports, commands, hosts, variables.

Nothing is run, and no parser of a language is used either: the `ast` of a quarter of a megabyte
of hostile Python takes 230 MB and half a second, and there is no well-kept parser of bash that
could stand in for the shell. Each reader goes once over the text, in linear time, and leaves out
what it cannot tell (a name that is put together at run time).
"""
