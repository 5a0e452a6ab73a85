"""What was printed reaches the agent, however the call ends."""

import pytest

from tests.e2e.stumbles.conftest import Agent

SAYS = {
    "python": "print('so far'); {more}",
    "bash": "echo so far; {more}",
    "javascript": "console.log('so far'); {more}",
}
WAITS = {
    "python": "import time; time.sleep(60)",
    "bash": "sleep 60",
    "javascript": "setTimeout(() => 0, 60000)",
}
DIES = {
    "python": "import os; os.kill(os.getpid(), 9)",
    "bash": "kill -9 $$",
    "javascript": "process.kill(process.pid, 'SIGKILL')",
}
GROWS = {
    "python": "x = bytearray(10**10)",
    "bash": "tail /dev/zero",
    "javascript": "const all = []; for (;;) all.push(Buffer.alloc(1e7, 1))",
}


@pytest.mark.parametrize("language", SAYS)
async def test_output_so_far_is_kept_at_a_time_out(agent: Agent, language: str) -> None:
    code = SAYS[language].format(more=WAITS[language])
    told = await agent.told("run_code", language=language, code=code, timeout_s=1)
    assert told.startswith("so far\n"), told
    assert "timed out after 1 s" in told


@pytest.mark.parametrize("language", SAYS)
async def test_output_so_far_is_kept_when_a_program_is_killed(agent: Agent, language: str) -> None:
    code = SAYS[language].format(more=DIES[language])
    told = await agent.told("run_code", language=language, code=code)
    assert told.startswith("so far\n"), told
    assert "killed by signal SIGKILL" in told


@pytest.mark.parametrize("settings", [{"limits": {"memory": "256m"}}])
@pytest.mark.parametrize("language", SAYS)
async def test_output_so_far_is_kept_when_memory_runs_out(agent: Agent, language: str) -> None:
    code = SAYS[language].format(more=GROWS[language])
    told = await agent.told("run_code", language=language, code=code)
    assert told.startswith("so far\n"), told
    assert "out of memory" in told


async def test_python_started_by_a_command_keeps_its_output_too(agent: Agent) -> None:
    code = SAYS["python"].format(more=WAITS["python"])
    told = await agent.told("exec", command=f'python3 -c "{code}"', timeout_s=1)
    assert told.startswith("so far\n"), told


async def test_the_log_of_a_background_python_fills_as_it_prints(agent: Agent) -> None:
    started = "python3 -c \"print('up'); open('go').read()\" > log & "
    waits = "until [ -s log ]; do sleep 0.01; done; cat log; echo > go"
    told = await agent.told("exec", command=f"mkfifo go; {started}{waits}", timeout_s=10)
    assert told.startswith("up\n"), told


async def test_buffering_is_a_choice_of_the_call(agent: Agent) -> None:
    command = "python3 -c \"import os; print('kept back'); os.kill(os.getpid(), 9)\""
    told = await agent.told("exec", command=command, env={"PYTHONUNBUFFERED": ""})
    assert not told.startswith("kept back"), told
