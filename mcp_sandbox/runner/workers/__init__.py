"""Processes that do one job at a time, and pid 1's side of them.

pool             forks workers, hands them jobs, hears of their end
worker           the process: one job, subreaper of all it starts
programs         how it starts one: descriptors, terminal, signals, priority
fork_server      workers and the warm interpreter as pid 1 sees them
python_worker    the warm interpreter: forks a fresh `__main__` for each piece of code
main_file        runs a file as `__main__`
child            runs it again in a process that multiprocessing starts anew
notebook         a Python that keeps its variables; `notebooks` is pid 1's side
figures          figures of Python code, kept as files
warm_shell       one bash that is ready before its command is there
"""
