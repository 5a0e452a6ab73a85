"""Everything that can be lost under a daemon is lost at random moments, under random load.

    python -m tests.e2e.faults --times 50

Real clients of the SDK work through relays in several chats, and write down what was acknowledged.
After each fault every acknowledged write must be there, every chat must work again, and whatever
nobody owns must have ended after the time that orphans have.
"""
