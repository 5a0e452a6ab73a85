"""Random load on chats' computers while runners, containers and servers are killed at random.

    python -m tests.e2e.endurance --minutes 5 --backend docker

Every acknowledged change of a file is written down and compared with what is found later; every
answer must carry what only the right answer can carry; at the end nothing may be left running.
"""
