"""Checks a machine and says what to do about what does not work; repairs and decides nothing.

`machine` looks whether sandboxes work here and with which limits; `attack` whether they hold:
`attack_inside` is the program that it runs in one.
"""
