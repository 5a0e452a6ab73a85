"""Checks a machine and says how to mend what does not work; changes nothing itself.

`machine` checks whether sandboxes work here and with which limits; `attack` tries to break out of
one, by `attack_inside`, the program that it runs there.
"""
