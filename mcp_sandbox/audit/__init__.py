"""The audit of a data root: one line for each event, each sealed with the hash of the one before.

    chain    how a line is written, and what is wrong with lines that were changed. Pure
    log      appends lines beside other processes that do, and reads them back

Who may write the folder can write the whole chain anew, and a removed end shows only to those
who have kept a later head: so servers log the head. This room does not know what an event means.
"""

from mcp_sandbox.audit.log import Audit as Audit
from mcp_sandbox.audit.log import open_audit as open_audit
