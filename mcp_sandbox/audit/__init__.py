"""The audit of a data root: one line for each event, each with the hash of the one before.

    chain      writes a line, and finds lines that were changed. Pure
    writer     appends lines to the files; other processes may do so at the same time
    audit      records a server's events, and decides when they reach the disk
    reading    reads the lines back, and checks them

A process that may write the folder can write the whole chain anew, and a removed end shows only by
a later head kept elsewhere: so servers log the head. This package does not know what events mean.
"""

from mcp_sandbox.audit.log import Audit as Audit
from mcp_sandbox.audit.log import open_audit as open_audit
