"""The audit of a data root: one line for each event, each sealed with the hash of the one before.

    chain      how a line is written, and what is wrong with lines that were changed. Pure
    writer     appends lines to the files, beside other processes that do
    audit      what a server records with, and when that reaches the disk
    reading    the lines again, for people

Whoever may write the folder can write the whole chain anew, and a removed end shows only to those
who have kept a later head: so servers log the head. This room does not know what an event means.
"""

from mcp_sandbox.audit.audit import Audit as Audit
from mcp_sandbox.audit.audit import open_audit as open_audit
