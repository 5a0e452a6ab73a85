"""What bundled scripts use, found by reading them: imports, commands, hosts, variables.

Nothing is run, and no parser of a language is used either: the `ast` of a quarter of a megabyte
of hostile Python takes 230 MB and stops the whole server for half a second, and there is no
well-kept parser of bash that could take its place for the shell. Each language has a reader of its
own that goes once over the text, in linear time, and makes the best of what it does not understand.
What a reader cannot tell (a name that is put together at run time) it leaves out.
"""
