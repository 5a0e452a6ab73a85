"""One chat's sandbox, from the first call to its end.

chat_sandbox    opens it at the first call, replaces it when it has died, lets go of it
lifecycle       how it is found, made and ended; whether it is the one that the agent saw last
context         what the sandboxes of one manager share, and the guard of the disk
notices         what an agent should know and did not ask for
capacity        how many may be open, in all and of one user
warm_pool       sandboxes that were started in advance
files           where the files of chats are, and what that means for their sandboxes
sandbox_files   the same for those that are in their sandbox alone
"""
