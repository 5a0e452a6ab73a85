from tests.e2e.stumbles.conftest import Agent

MAKE = r"""
import gzip, sqlite3, zipfile
base = sqlite3.connect("it's.db")
base.execute("CREATE TABLE pets (name TEXT)")
base.commit()
zipfile.ZipFile("book.xlsx", "w").writestr("xl/sheet1.xml", "<a/>")
gzip.open("log.gz", "wt").write("a line\n")
open("notes.txt", "w", encoding="utf-16").write("Grüße\n")
open("it's.txt", "w", encoding="koi8-r").write("Привет всем\n")
open("chinese.txt", "w", encoding="gbk").write("使用说明 请先安装程序\n")
open("small.pdf", "w").write("%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n")
"""


async def test_a_file_without_a_size_is_not_called_empty(agent: Agent) -> None:
    said = await agent.told("read_file", path="/proc/cpuinfo")
    assert "processor" in said
    assert "empty" not in said
    await agent.told("write_file", path="nothing", content="")
    assert await agent.told("read_file", path="nothing") == "[the file is empty]"


async def test_binary_files_come_with_a_command_that_reads_them(agent: Agent) -> None:
    await agent.told("run_code", language="python", code=MAKE)
    for name, what, shown in (
        ("it's.db", "a SQLite database", "CREATE TABLE pets"),
        ("book.xlsx", "a zip file", "xl/sheet1.xml"),
        ("log.gz", "gzip data", "a line"),
        ("notes.txt", "perhaps UTF-16 text", "Grüße"),
        ("it's.txt", "perhaps KOI8-R text", "Привет всем"),
        ("chinese.txt", "perhaps GB18030 text", "使用说明"),
    ):
        said = await agent.told("read_file", path=name)
        assert what in said
        command = said.partition("[to get at it: ")[2].removesuffix("]").partition("; with")[0]
        done = await agent.told("exec", command=command.partition(", or for")[0])
        assert shown in done
        assert "exit code" not in done


async def test_text_that_is_not_utf_8_is_shown_apart_with_a_command_that_converts_it(
    agent: Agent,
) -> None:
    await agent.told("exec", command=r'''printf "caf\xe9\ncaf\xe8\n" > "it's"''')
    said = await agent.told("read_file", path="it's")
    assert said.startswith(
        "     1\tcaf\\xe9\n     2\tcaf\\xe8\n[bytes that are not UTF-8 are shown"
    )
    assert "perhaps WINDOWS-1252, a guess" in said
    done = await agent.told("exec", command=said.partition("exec ")[2].removesuffix("]"))
    assert done == "café\ncafè\n"
    await agent.told("exec", command=r"seq -f naïve%g 9 > f; printf 'stray \xe9\n' >> f")
    said = await agent.told("read_file", path="f")
    done = await agent.told("exec", command=said.partition("exec ")[2].removesuffix("]"))
    assert done.startswith("10:stray")
    assert "naïve" not in done


async def test_a_small_pdf_is_not_shown_as_text(agent: Agent) -> None:
    await agent.told("run_code", language="python", code=MAKE)
    said = await agent.told("read_file", path="small.pdf")
    assert "a PDF" in said
    assert "pdftotext small.pdf - (poppler-utils) or pypdf, where one is installed" in said


async def test_other_data_names_no_program_that_may_be_missing(agent: Agent) -> None:
    await agent.told("exec", command=r"printf '\x7fELF\0\0\1' > a.bin")
    said = await agent.told("read_file", path="a.bin")
    assert r"b'\x7fELF\x00\x00\x01'" in said
    shown = await agent.told("exec", command=said.partition("all bytes: ")[2].removesuffix("]"))
    assert "7f 45 4c 46" in shown
    assert not any(word in said for word in ("xxd", "strings", "unzip", "file,"))


async def test_chmod_is_not_advised_where_it_cannot_help(agent: Agent) -> None:
    for path in ("/etc/passwd", "/usr/bin/env"):
        said = await agent.refused("write_file", path=path, content="x")
        assert "chmod" not in said
        assert "copy it into the workspace and change the copy" in said
    await agent.told("exec", command="echo a > mine && chmod 400 mine")
    assert "make it writable with chmod" in await agent.refused(
        "write_file", path="mine", content="x"
    )
