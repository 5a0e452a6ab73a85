"""One caller among several of a chat: random calls on a directory of its own, all checked."""

import json
from random import Random
from typing import Any

from tests.e2e.endurance.chat import Chat, Unanswered, text_of
from tests.e2e.endurance.ledger import Found, Ledger, Possible

_FILES = 24
# read_file shows a file of this size in one answer.
_WHOLE = 15_000
_LOOK = """\
import hashlib, json, os
found = {{}}
for name in os.listdir({folder!r}) if os.path.isdir({folder!r}) else ():
    with open(os.path.join({folder!r}, name), "rb") as file:
        data = file.read()
    found[name] = [len(data), hashlib.sha256(data).hexdigest()]
print(json.dumps([{nonce!r}, found]))
"""
_WRITE = """\
import os
os.makedirs({folder!r}, exist_ok=True)
with open({draft!r}, "w") as file:
    file.write({content!r})
    file.flush()
    os.fsync(file.fileno())
os.rename({draft!r}, {path!r})
print({nonce!r})
"""


class Worker:
    """Makes one call after the other, and knows what each answer must be."""

    def __init__(self, chat: Chat, folder: str, random: Random) -> None:
        self.ledger = Ledger()
        self._chat = chat
        self._tally = chat.tally
        self._folder = folder
        self._random = random
        self._serial = 0
        self._acts = {
            self._write: 20,
            self._append: 12,
            self._echo: 14,
            self._code: 12,
            self._read: 18,
            self._edit: 10,
            self._list: 5,
            self._move: 5,
            self._delete: 4,
        }

    async def step(self) -> None:
        """One random call, or a look at what became of one that was not answered."""
        if self.ledger.unsure or self._random.random() < 0.04:
            await self.look()
            return
        act = self._random.choices(list(self._acts), list(self._acts.values()))[0]
        try:
            await (act if self.ledger.certain else self._write)()
        except Unanswered:
            self._tally.count("unacknowledged calls")

    async def look(self) -> bool:
        """Compare every file with the ledger; False when the call was not answered."""
        nonce = self._nonce()
        code = _LOOK.format(folder=self._folder, nonce=nonce)
        try:
            result = await self._chat.call("run_code", code=code, timeout_s=60)
        except Unanswered:
            return False
        told = result.content[0].text
        if nonce not in told:
            self._mixed("run_code", nonce, told)
            return False
        found = {name: Found(*seen) for name, seen in json.loads(told)[1].items()}
        self._compare(found)
        return True

    def _compare(self, found: dict[str, Found]) -> None:
        names = {*self.ledger.names, *found}
        self._tally.count("files checked", len(names))
        for name in sorted(names):
            wrong = self.ledger.see(name, found.get(name))
            if wrong == "happened":
                self._tally.count("unacknowledged changes that happened")
            elif wrong == "late":
                self._tally.count("unacknowledged changes that happened late")
            elif wrong == "cut short":
                self._tally.count("appends cut short by a kill")
            elif wrong:
                self._tally.fault(
                    "lost or wrong files", f"{self._chat.name}/{self._folder} {wrong}"
                )

    async def _write(self) -> None:
        name = self._random.choice([*self.ledger.certain, None]) or self._new_name()
        data = self._content()
        path = f"{self._folder}/{name}"
        before = self.ledger.content(name)
        self.ledger.doubt(name, Possible(data))
        result = await self._chat.call("write_file", path=path, content=data.decode())
        self._acknowledged(name, data)
        self._expect("write_file", f"{'created' if before is None else 'replaced'} ", result)
        self._expect("write_file", f"{path} ({len(data):,} byte", result)

    async def _append(self) -> None:
        name, more = self._any_file(), self._content()
        before = self.ledger.certain[name]
        self.ledger.doubt(name, Possible(before, more))
        path = f"{self._folder}/{name}"
        result = await self._chat.call("write_file", path=path, content=more.decode(), append=True)
        self._acknowledged(name, before + more)
        self._expect("write_file", f"appended to {path} ({len(more):,} byte", result)

    async def _echo(self) -> None:
        name = self._any_file()
        nonce = self._nonce()
        before, more = self.ledger.certain[name], f"{nonce}\n".encode()
        self.ledger.doubt(name, Possible(before, more))
        command = f"echo {nonce} >> $F && sync $F && tail -c {len(more)} $F"
        environment = {"F": f"{self._folder}/{name}"}
        result = await self._chat.call("exec", command=command, env=environment, timeout_s=60)
        self._acknowledged(name, before + more)
        if result.content[0].text != f"{nonce}\n":
            self._mixed("exec", nonce, text_of(result))

    async def _code(self) -> None:
        nonce, name = self._nonce(), self._new_name()
        data = self._content()
        path = f"{self._folder}/{name}"
        self.ledger.doubt(name, Possible(data))
        code = _WRITE.format(
            folder=self._folder,
            draft=f".{nonce}",
            path=path,
            content=data.decode(),
            nonce=nonce,
        )
        result = await self._chat.call("run_code", code=code, timeout_s=60)
        self._acknowledged(name, data)
        if result.content[0].text != f"{nonce}\n":
            self._mixed("run_code", nonce, text_of(result))

    async def _read(self) -> None:
        name = self._any_file(at_most=_WHOLE)
        result = await self._chat.call("read_file", path=f"{self._folder}/{name}")
        shown = [line.partition("\t")[2] for line in result.content[0].text.splitlines()]
        data = self.ledger.certain[name]
        lines = data.decode().splitlines()
        if shown != (lines if len(data) <= _WHOLE else lines[: len(shown)]):
            self._mixed("read_file", name, text_of(result)[:300])

    async def _edit(self) -> None:
        name = self._any_file()
        before, nonce = self.ledger.certain[name], self._nonce()
        old = before.decode().splitlines()[0]
        after = before.replace(old.encode(), nonce.encode(), 1)
        self.ledger.doubt(name, Possible(after))
        path = f"{self._folder}/{name}"
        result = await self._chat.call("edit_file", path=path, old=old, new=nonce)
        self._acknowledged(name, after)
        self._expect("edit_file", f"+{nonce}\n", result)

    async def _list(self) -> None:
        result = await self._chat.call("list_files", path=self._folder)
        entries = (result.structured_content or {}).get("entries", [])
        found = {entry["name"]: entry["size"] for entry in entries}
        known = {f"{self._folder}/{n}": len(data) for n, data in self.ledger.certain.items()}
        for name in self.ledger.given_up:
            found.pop(f"{self._folder}/{name}", None)
        if found != known:
            self._mixed("list_files", str(known)[:300], str(found)[:300])

    async def _move(self) -> None:
        name = self._any_file()
        data, target = self.ledger.certain[name], self._new_name(fresh=True)
        self.ledger.doubt(name, Possible(None))
        self.ledger.doubt(target, Possible(data))
        source, destination = f"{self._folder}/{name}", f"{self._folder}/{target}"
        result = await self._chat.call("move_file", source=source, destination=destination)
        self._acknowledged(name, None)
        self.ledger.acknowledge(target, data)
        self._expect("move_file", f"moved {source} to {destination}", result)

    async def _delete(self) -> None:
        name = self._any_file()
        self.ledger.doubt(name, Possible(None))
        result = await self._chat.call("delete_file", path=f"{self._folder}/{name}")
        self._acknowledged(name, None)
        self._expect("delete_file", f"deleted file {self._folder}/{name}", result)

    def _any_file(self, *, at_most: int = 1 << 30) -> str:
        """A file that is there, of at most so many bytes if there is one."""
        sizes = {name: len(data) for name, data in self.ledger.certain.items()}
        fitting = [name for name, size in sizes.items() if size <= at_most]
        return self._random.choice(fitting or list(sizes))

    def _new_name(self, *, fresh: bool = False) -> str:
        names = list(self.ledger.certain)
        if len(names) >= _FILES and not fresh:
            return self._random.choice(names)
        return f"{self._nonce()}.txt"

    def _nonce(self) -> str:
        self._serial += 1
        return (
            f"{self._chat.name}-{self._folder}-{self._serial}-{self._random.getrandbits(48):012x}"
        )

    def _content(self) -> bytes:
        size = self._random.choice((1, 1, 3, 10, 100, 100, 3000))
        lines = [self._nonce(), *(f"{self._random.getrandbits(64):016x}" for _ in range(size))]
        return ("\n".join(lines) + "\n").encode()

    def _acknowledged(self, name: str, data: bytes | None) -> None:
        self._tally.count("acknowledged changes")
        self.ledger.acknowledge(name, data)

    def _expect(self, tool: str, part: str, result: Any) -> None:
        if part not in text_of(result):
            self._mixed(tool, part, text_of(result)[:300])

    def _mixed(self, tool: str, expected: str, told: str) -> None:
        self._tally.fault(
            "mixed-up replies",
            f"{self._chat.name}/{self._folder}: {tool} told {told[-600:]!r}, expected {expected!r}",
        )
