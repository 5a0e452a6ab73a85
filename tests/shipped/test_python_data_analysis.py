"""A table is understood with what every sandbox has."""

import ast
import json

from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import on_docker_if_whole
from tests.shipped.conftest import learn, run
from tests.shipped.texts import commands

NAME = "python-data-analysis"
SCRIPTS = f"python3 /opt/skills/{NAME}/scripts"
SALES = """\
id,day,customer,amount
1,2026-01-03,7,10.50
2,2026-01-20,8,99
3,2026-02-01,7,
4,2026-02-14,7,40.25
5,2026-03-01,8,7
"""
CUSTOMERS = "id;city;code\n7;Oslo;007\n8;Bergen;08\n"


async def with_tables(session: Session) -> None:
    await learn(session, NAME)
    await session.write_file("sales.csv", SALES.encode())
    await session.write_file("customers.csv", CUSTOMERS.encode("utf-8-sig"))


async def test_every_command_works_as_written(session: Session) -> None:
    await with_tables(session)
    profile, load, ask, compute, hand_over = commands(NAME)
    shown = (await run(session, profile)).stdout
    assert "sales.csv: 5 rows, 4 columns" in shown
    assert (
        "  amount    number   1        4         7.0         99.0        39.1875  25.375" in shown
    )
    assert (await run(session, load)).stdout.splitlines() == [
        "sales: 5 rows (id INTEGER, day TEXT, customer INTEGER, amount REAL)",
        "customers: 2 rows (id INTEGER, city TEXT, code TEXT)",
    ]
    rows = [line.split() for line in (await run(session, ask)).stdout.splitlines()]
    assert [rows[0], *rows[2:]] == [
        ["city", "orders", "total"],
        ["Bergen", "2", "106.0"],
        ["Oslo", "3", "50.75"],
    ]
    assert (await run(session, compute)).stdout == "median 25.375 deviation 42.57\n"
    await run(session, hand_over)
    totals = (await session.exec("tr -d '\\r' < outputs/totals.csv")).stdout
    assert totals == "customer,total\n7,50.75\n8,106.0\n"


@on_docker_if_whole
async def test_every_recipe_answers(session: Session) -> None:
    await with_tables(session)
    await run(session, f"{SCRIPTS}/load_sqlite.py data.db sales.csv customers.csv")
    answers = []
    for recipe in commands(NAME, "references/sql-recipes.md", "sql"):
        await session.write_file("recipe.sql", recipe.encode())
        answers.append((await run(session, "sqlite3 data.db < recipe.sql")).stdout.split())
    share, median, months, bad_days, running, best, twice, odd, lost, not_numbers = answers
    assert share == ["8|106.0|67.6", "7|50.75|32.4"]
    assert median == ["25.375"]
    assert months == ["2026-01|109.5|", "2026-02|40.25|-69.25", "2026-03|7.0|-33.25"]
    assert running[-1] == "2026-03-01|7.0|156.75"
    assert best == ["7|2026-02-14|40.25", "8|2026-01-20|99.0"]
    assert (bad_days, twice, odd, lost, not_numbers) == ([], [], [], [], [])


@on_docker_if_whole
async def test_a_profile_names_the_traps(session: Session) -> None:
    await learn(session, NAME)
    await session.write_file("odd.csv", "a;a;\n1;00123;x\nn/a;5;caf\xe9\n2;7\n".encode("latin-1"))
    found = await run(session, f"{SCRIPTS}/profile_table.py --json odd.csv")
    facts = json.loads(found.stdout)
    assert [(c["column"], c["type"]) for c in facts["columns"]] == [
        ("a", "text"),
        ("a_2", "text"),
        ("column_3", "text"),
    ]
    assert facts["columns"][0]["note"] == "2 are numbers, but not 'n/a'"
    assert facts["rows_with_other_width"] == facts["rows_with_replaced_bytes"] == 1
    right = await run(session, f"{SCRIPTS}/profile_table.py --encoding latin-1 odd.csv")
    assert "café (1)" in right.stdout
    lines = b'{"id": 1, "tags": ["a"]}\n{"id": 2.5}\n'
    await session.write_file("events.jsonl", lines)
    shown = (await run(session, f"{SCRIPTS}/profile_table.py events.jsonl")).stdout
    assert "events.jsonl: 2 rows, 2 columns" in shown
    assert '["a"] (1)' in shown


@on_docker_if_whole
async def test_all_files_are_loaded_or_none(session: Session) -> None:
    await with_tables(session)
    load = f"{SCRIPTS}/load_sqlite.py data.db"
    missing = await run(session, f"{load} sales.csv nosuch.csv", code=2)
    assert missing.stderr == "load_sqlite.py: nosuch.csv: No such file or directory\n"
    await run(session, f"{load} sales.csv")
    assert "--replace loads it again" in (await run(session, f"{load} sales.csv", code=1)).stderr
    await run(session, f"{load} --replace sales.csv")
    counted = await run(session, "sqlite3 data.db 'SELECT count(*) FROM sales'")
    assert counted.stdout == "5\n"
    await session.write_file("broken.jsonl", b"{")
    assert "broken.jsonl" in (await run(session, f"{load} broken.jsonl", code=2)).stderr


async def test_pandas_is_not_needed_and_its_text_is_python(session: Session) -> None:
    for block in commands(NAME, "references/pandas.md", "python"):
        ast.parse(block)
    told = await session.exec("python3 -c 'import pandas'")
    assert told.exit_code == 1, "pandas is there now: run the blocks of references/pandas.md here"
