"""What chats have activated, as the server remembers it."""

from pathlib import Path

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.skills import ActiveSkill, Skills
from mcp_sandbox.skills.library import SkillLibrary


def test_a_user_of_very_many_chats_makes_nobody_else_forget_a_skill(data_root: Path) -> None:
    skills = Skills(SkillLibrary(SkillsConfig(shipped=False), data_root))
    mine = ChatId("alice", "work")
    skills.find_activated(mine).active["uri"] = ActiveSkill(
        "uri", "pdf", "sha256:0", None, ("Read",)
    )
    for number in range(2000):
        skills.find_activated(ChatId("bob", f"chat-{number}"))
    assert [each.name for each in skills.find_activated(mine).active.values()] == ["pdf"]
    for number in range(500):
        skills.find_activated(ChatId(f"user-{number}", "new"))
    assert len(skills._learned) <= 1000
