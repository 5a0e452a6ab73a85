"""Git as an agent uses it, in a chat that nobody has prepared."""

from mcp_sandbox.sessions.session import Session

AUTHOR = "git log -1 --format='%an <%ae> %D'"


async def test_a_commit_in_a_new_chat_needs_no_setting(session: Session) -> None:
    result = await session.exec(
        "git init -q && touch a && git add a && git commit -qm one && " + AUTHOR
    )
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout == "Sandbox <sandbox@localhost> HEAD -> main\n"


async def test_nearer_settings_come_before_the_sandboxs_own(session: Session) -> None:
    commit = f"git commit -qm x --allow-empty && {AUTHOR}"
    result = await session.exec(
        "git config --global user.name Home && git config --global init.defaultBranch trunk && "
        f"git init -q && {commit} && git config user.name Own && {commit} && "
        f"env GIT_AUTHOR_NAME=Env {commit.replace('&& git', '&& env git')}"
    )
    assert result.stdout.splitlines() == [
        f"{name} <sandbox@localhost> HEAD -> trunk" for name in ("Home", "Own", "Env")
    ], result.stderr


async def test_a_repository_of_another_user_is_trusted(session: Session) -> None:
    result = await session.exec(
        "git init -q && GIT_TEST_ASSUME_DIFFERENT_OWNER=1 git status --short --branch"
    )
    assert (result.exit_code, result.stderr) == (0, "")
