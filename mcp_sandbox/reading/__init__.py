"""Reads code without running it: commands of a shell, statements of Python, tokens of JavaScript.

No parser of a language is used: the `ast` of a quarter of a megabyte of hostile Python takes
230 MB and half a second, and there is no well-kept parser of bash that could stand in for the
shell. Each reader passes once over the text, in linear time, never fails, and has DYNAMIC for what
it cannot tell.

    shell       the commands of a shell
    code        statements of Python, tokens of JavaScript
    commands    the program that a command runs
    json_size   how much JSON there is to parse

Whether code is harmful is not judged here.
"""
