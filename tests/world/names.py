"""A name server: answers by table, look-up by look-up, and writes down what it is asked."""

import ipaddress
import socketserver
import struct
from collections import Counter
from collections.abc import Sequence

from tests.world import GITS, NAMES, PUBLIC, PUBLIC_SUFFIXES, SHOPS
from tests.world.heard import Heard

_TYPES = {1: 4, 28: 6}
_IS_ANSWER, _NO_SUCH_NAME = 0x8580, 0x8583


class NameServer(socketserver.ThreadingUDPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], heard: Heard) -> None:
        super().__init__(address, _Question)
        self.heard = heard
        self.asked = Counter[tuple[str, int]]()

    def addresses(self, name: str, kind: int) -> Sequence[str] | None:
        """What a name answers this time to a question of one kind; None: there is no such name."""
        self.asked[name, kind] += 1
        if name in NAMES:
            answers = NAMES[name]
            return answers[min(self.asked[name, kind], len(answers)) - 1]
        is_known = name in SHOPS or name in GITS or name.endswith(PUBLIC_SUFFIXES)
        return [PUBLIC] if is_known else None


class _Question(socketserver.BaseRequestHandler):
    server: NameServer

    def handle(self) -> None:
        query, line = self.request
        name, end = _name(query)
        (kind,) = struct.unpack_from("!H", query, end)
        if kind == 1:
            self.server.heard.note("name", name=name)
        if name.startswith("silent"):
            return
        found = self.server.addresses(name, kind)
        parsed = [ipaddress.ip_address(each) for each in found or ()]
        fitting = [each for each in parsed if each.version == _TYPES.get(kind)]
        head = query[:2] + struct.pack(
            "!5H", _NO_SUCH_NAME if found is None else _IS_ANSWER, 1, len(fitting), 0, 0
        )
        answers = [
            struct.pack("!3HIH", 0xC00C, kind, 1, 0, len(each.packed)) + each.packed
            for each in fitting
        ]
        line.sendto(head + query[12 : end + 4] + b"".join(answers), self.client_address)


def _name(query: bytes) -> tuple[str, int]:
    """The name that is asked for, and where the kind of question is."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("latin-1").lower())
        at += 1 + length
    return ".".join(labels), at + 1
