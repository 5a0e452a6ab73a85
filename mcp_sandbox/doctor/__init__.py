"""Checks a machine and says what to do about what does not work; repairs and decides nothing."""
