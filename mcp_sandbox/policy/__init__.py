"""Grades code by its text before it runs, and decides what follows from the grade.

    assess         the grade of a text, and what follows from it
    rules          what is looked for; default.yaml has the shipped ones, with examples
    shell, code    what a command line, Python or JavaScript does, as the rules ask

Code can be disguised, so policy is no wall; the sandbox is. A grade refuses what surely destroys
the user's work, picks the few calls to ask about, and is recorded. This package runs nothing, and
knows neither chats nor how a person is asked.
"""

from mcp_sandbox.policy.assess import Decision as Decision
from mcp_sandbox.policy.assess import Profile as Profile
from mcp_sandbox.policy.assess import assess as assess
from mcp_sandbox.policy.assess import assess_aside as assess_aside
from mcp_sandbox.policy.assess import check_examples as check_examples
from mcp_sandbox.policy.assess import choose_profile as choose_profile
from mcp_sandbox.policy.assess import decide as decide
from mcp_sandbox.policy.assess import load_rules as load_rules
from mcp_sandbox.policy.rules import Assessment as Assessment
from mcp_sandbox.policy.rules import Level as Level
from mcp_sandbox.policy.rules import RuleMatch as RuleMatch
from mcp_sandbox.policy.rules import Rules as Rules
