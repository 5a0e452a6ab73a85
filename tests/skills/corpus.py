"""Skills as they are found in the world, and as somebody would write them who means harm.

`CASES` are documents; each says whether it is used and what is said about it. `write` puts them
all into a folder, a folder each. `plant` makes what no document can be: pipes, devices, links.
"""

import os
from dataclasses import dataclass
from pathlib import Path

BODY = "# How to do it\n\nStep by step.\n"


@dataclass(frozen=True)
class Case:
    """A document in a folder, how it is spelled, and what reading it gives.

    `codes` are those of its diagnostics, in their order; it is used if none of `errors` is there.
    """

    name: str
    document: bytes
    codes: tuple[str, ...] = ()
    loads: bool = True
    folder: str = ""
    spelling: str = "SKILL.md"

    @property
    def folder_name(self) -> str:
        return self.folder or self.name


def good(name: str, more: str = "", body: str = BODY) -> str:
    return f"---\nname: {name}\ndescription: Does {name}.\n{more}---\n{body}"


def of(
    name: str,
    document: str | bytes,
    *codes: str,
    loads: bool = True,
    folder: str = "",
    spelling: str = "SKILL.md",
) -> Case:
    data = document if isinstance(document, bytes) else document.encode()
    return Case(name, data, codes, loads, folder, spelling)


def refused(name: str, document: str | bytes, *codes: str, folder: str = "") -> Case:
    return of(name, document, *codes, loads=False, folder=folder)


def fields(text: str) -> str:
    return f"---\n{text}\n---\n{BODY}"


def described(name: str, value: str) -> str:
    return f"---\nname: {name}\ndescription: {value}\n---\n{BODY}"


def keys(count: int) -> str:
    return "".join(f"k{number}: v\n" for number in range(count))


def nested_maps(depth: int) -> str:
    return "".join(f"{' ' * level}a:\n" for level in range(depth)) + f"{' ' * depth}a: b\n"


ORDINARY = (
    of("plain", good("plain")),
    of("full", good("full", "license: MIT\ncompatibility: git\nmetadata:\n  author: me\n")),
    of("tools-text", good("tools-text", "allowed-tools: Bash(git add:*) Read\n")),
    of("tools-commas", good("tools-commas", "allowed-tools: Read, Bash(git log:*, git show:*)\n")),
    of("tools-block-list", good("tools-block-list", "allowed-tools:\n  - Read\n  - Bash(ls)\n")),
    of("folded", described("folded", ">\n  Does this\n  and that.\n\n  And more.")),
    of("folded-strip", described("folded-strip", ">-\n  Does this\n  and that.")),
    of("literal", described("literal", "|\n  Does this\n  and that.")),
    of("continued", described("continued", "Does this\n  and that.")),
    of("double-quoted", described("double-quoted", '"Use when: \\"it\\" \\u2013 is"')),
    of("single-quoted", described("single-quoted", "'Use when: it''s so'")),
    of("no-body", good("no-body", body="")),
    of("no-final-line-end", good("no-final-line-end", body="")[:-1]),
    of("commented", fields("# A comment\nname: commented # so\ndescription: Does.\n")),
    of("umlaut-größe", good("umlaut-größe")),
    of("汉字", good("汉字")),
    of("word-number-3", good("word-number-3")),
    of("64" * 32, good("64" * 32)),
    of("1024", described("'1024'", "d" * 1024)),
)

DASHES = (
    of("dashes-in-line", described("dashes-in-line", "Before --- after.")),
    of("dashes-indented", described("dashes-indented", "|\n  one\n  ---\n  two")),
    of("dashes-in-quotes", described("dashes-in-quotes", '"a\n  --- b\n  ---"')),
    of("dashes-in-body", good("dashes-in-body", body="a\n\n---\n\nb\n---\n")),
    of("four-dashes", good("four-dashes", body="----\n")),
    of("rule-after-fence", good("rule-after-fence", body="---\n")),
    of("fence-blanks", good("fence-blanks").replace("---\n", "---  \t\n"), "fence-spaces"),
    of("dots", "---\nname: dots\ndescription: Does.\n...\n" + BODY, "dots"),
    of("dots-then-dashes", "---\nname: dots-then-dashes\ndescription: D.\n...\n---\nBody", "dots"),
    of("blank-first", "\n" + good("blank-first"), "blank-first-line"),
    of("blanks-first", " \r\n\t\n" + good("blanks-first"), "blank-first-line", "line-ends"),
    refused("unclosed", "---\nname: unclosed\ndescription: Does.\n\n# Title\n", "unclosed"),
    refused("unclosed-long", "---\nname: unclosed-long\n" + "x: y\n" * 10_000, "unclosed"),
    refused("unclosed-indented", "---\nname: a\ndescription: D.\n  ---\nBody\n", "unclosed"),
    refused("only-fence", "---", "unclosed"),
    refused("indented-fence", " " + good("indented-fence"), "no-front-matter"),
    refused("long-fence", "-" + good("long-fence"), "no-front-matter"),
    refused("fence-with-word", "--- yaml\nname: a\n---\n", "no-front-matter"),
    refused("em-dash", "—\nname: a\n—\n", "no-front-matter"),
    refused("toml", "+++\nname = 'a'\n+++\n", "no-front-matter"),
    refused("text-first", "Hello\n" + good("text-first"), "no-front-matter"),
    refused("no-front-matter", BODY, "no-front-matter"),
    refused("all-dashes", "-" * 1_000_000, "no-front-matter"),
    refused("empty", "", "empty"),
    refused("white", " \n\t\n", "empty"),
    refused("no-fields", "---\n---\n" + BODY, "no-name", "no-description"),
    refused("only-comment", fields("# nothing"), "no-name", "no-description"),
)

BYTES = (
    of("bom", b"\xef\xbb\xbf" + good("bom").encode(), "byte-order-mark"),
    of("crlf", good("crlf").replace("\n", "\r\n"), "line-ends"),
    of("old-mac", good("old-mac").replace("\n", "\r"), "line-ends"),
    of("mixed-ends", good("mixed-ends").replace("\n", "\r\n", 2), "line-ends"),
    of(
        "bom-crlf",
        b"\xef\xbb\xbf" + good("bom-crlf").replace("\n", "\r\n").encode(),
        "byte-order-mark",
        "line-ends",
    ),
    refused("two-boms", b"\xef\xbb\xbf" * 2 + good("two-boms").encode(), "no-front-matter"),
    refused("utf-16", good("utf-16").encode("utf-16"), "not-utf-8"),
    refused("utf-16-no-mark", good("utf-16-no-mark").encode("utf-16-le"), "not-utf-8"),
    refused("latin-1", described("latin-1", "Größe").encode("latin-1"), "not-utf-8"),
    refused(
        "surrogate",
        described("surrogate", "a\ud800b").encode("utf-8", "surrogatepass"),
        "not-utf-8",
    ),
    refused("overlong", b"---\nname: overlong\ndescription: a\xc0\xaf\n---\n", "not-utf-8"),
    of("latin-1-body", good("latin-1-body", body="Größe").encode("latin-1")),
    of("nul-in-body", good("nul-in-body", body="a\0b\n")),
    refused("nul", described("nul", "a\0b"), "control-character"),
    refused("escape", described("escape", "a\x1b[31mb"), "control-character"),
    refused("c1", described("c1", "it\x92s"), "control-character"),
    of("mark-inside", described("mark-inside", "a\ufeffb"), "hidden-character"),
    of("escaped-escape", described("escaped-escape", '"a\\x1b[31mb"'), "control-character"),
    of("escaped-c1", described("escaped-c1", '"it\\x92s"'), "control-character"),
    of("escaped-nul", described("escaped-nul", '"a\\0b"'), "control-character"),
    of("bidi", described("bidi", "Safe \u202e evil."), "hidden-character"),
    of("zero-width", described("zero-width", "Safe\u200b evil."), "hidden-character"),
    of("tags", described("tags", "Safe\U000e0041\U000e0042."), "hidden-character"),
    of("joined-emoji", described("joined-emoji", "For 👩\u200d💻.")),
    of("next-line", described("next-line", "one\x85  two")),
)

SCALARS = (
    of("3000", described("3000", "3000")),
    of("on", described("on", "on")),
    of("null", described("null", "null")),
    of("2026-01-01", described("2026-01-01", "2026-01-01")),
    of("0x1f", described("0x1f", "0x1F")),
    of("1e3", described("1e3", "1e3")),
    of("scalars", good("scalars", "metadata:\n  a: ~\n  b: .nan\n  c: 12:30:45\n  d:\n  e: 010\n")),
    of("keys", good("keys", "metadata:\n  1: a\n  null: b\n  true: c\n  2026-01-01: d\n  ~: e\n")),
    of("merge-key", good("merge-key", "metadata:\n  <<: a\n")),
)

YAML = (
    of("colon", described("colon", "Use when: a PDF is there"), "yaml"),
    of("colon-at-end", described("colon-at-end", "Use when:"), "yaml"),
    of("colon-quote", described("colon-quote", "It's so: 'yes'"), "yaml"),
    of("colon-continued", described("colon-continued", "Use when: a\n  and: b"), "yaml"),
    of("colon-wrapped", described("colon-wrapped", "Does this\n  and that. Like: so"), "yaml"),
    of(
        "colon-crlf",
        described("colon-crlf", "Use: it").replace("\n", "\r\n"),
        "line-ends",
        "yaml",
    ),
    of("colon-nested", good("colon-nested", "metadata:\n  a: b: c\n"), "yaml"),
    of(
        "two-colons",
        fields("name: two-colons\ndescription: a: b\ncompatibility: c: d"),
        "yaml",
    ),
    of("bracket", described("bracket", "[Beta] Does."), "yaml"),
    of("brace", described("brace", "{x} is done."), "yaml"),
    of("percent", described("percent", "%d is printed."), "yaml"),
    of("at", described("at", "@mentions."), "yaml"),
    of("backtick", described("backtick", "`jq` filters."), "yaml"),
    of("quoted-start", described("quoted-start", '"Fast" tables.'), "yaml"),
    of("comma", described("comma", ", it goes on."), "yaml"),
    of("broken-json", good("broken-json", 'metadata: {"a":["b"],["c"]}\n'), "key", "metadata"),
    of("open-json", good("open-json", 'metadata: {"a":{"b":1}\n'), "yaml", "metadata"),
    of(
        "colon-and-json",
        fields('name: colon-and-json\ndescription: So: it\nmetadata: {\n  "a": 1\n}'),
        "yaml",
        "metadata",
    ),
    of("number-sign", described("number-sign", "Fixes #12 and more."), "comment"),
    of("c-sharp", described("c-sharp", "For C# and F#.")),
    of("star", described("star", "*Bold* text."), "yaml"),
    of("list-start", described("list-start", "- one"), "yaml"),
    of("flow-list", good("flow-list", "allowed-tools: [Read, Bash]\n"), "flow-style"),
    of("flow-map", good("flow-map", 'metadata: {"a": {"b": [1, null]}}\n'), "flow-style"),
    of("flow-lines", good("flow-lines", 'metadata: {\n  "a": 1,\n  "b": 2\n  }\n'), "flow-style"),
    of("open-quote", described("open-quote", '"Does.'), "yaml"),
    of("tab", good("tab", "metadata:\n\ta: b\n"), "yaml"),
    refused("bad-indent", fields("name: bad-indent\n description: D."), "yaml"),
    of("bare-line", good("bare-line", "just words\n"), "yaml"),
    refused("second-document", fields("name: a\n--- b\nc: d"), "yaml"),
    refused("directive", fields("%YAML 1.2\nname: a"), "yaml"),
    refused("sequence", fields("- name: sequence"), "not-a-mapping"),
    refused("scalar", fields("name"), "not-a-mapping"),
    refused("alias", good("alias", "a: &a x\nb: *a\n"), "alias"),
    of("anchor", good("anchor", "license: &l MIT\n"), "anchor"),
    refused("merge-alias", good("merge-alias", "a: &a\n  b: c\nd:\n  <<: *a\n"), "alias"),
    refused("tag", good("tag", "license: !!python/name:os.system x\n"), "tag"),
    refused("tag-object", fields("!!python/object/apply:os.system [id]"), "not-a-mapping"),
    refused("tag-local", described("tag-local", "!important thing"), "tag"),
    refused("tag-set", good("tag-set", "metadata: !!set\n  ? a\n"), "tag"),
    refused("duplicate", good("duplicate", "name: other\n"), "duplicate-key"),
    refused(
        "duplicate-nested", good("duplicate-nested", "metadata:\n  a: b\n  a: c\n"), "duplicate-key"
    ),
    of("list-key", good("list-key", "? [a, b]\n: c\n"), "key"),
    of("map-key", good("map-key", "{a: b}: c\n"), "key"),
)

LAUGHS = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n"
BOMBS = (
    refused("laughs", good("laughs", LAUGHS), "alias"),
    of("braces", good("braces", "metadata: " + "{" * 10_000 + "\n"), "key", "metadata"),
    refused("brackets", good("brackets", "metadata: " + "[" * 10_000 + "\n"), "too-deep"),
    refused("brackets-lines", good("brackets-lines", "m:\n" + " [\n" * 5_000), "too-deep"),
    refused("deep-maps", good("deep-maps", nested_maps(60)), "too-deep"),
    refused("deep-lists", good("deep-lists", "a:\n  " + "- " * 500 + "b\n"), "too-deep"),
    refused(
        "deep-json", good("deep-json", "a: " + '{"b":' * 40 + "1" + "}" * 40 + "\n"), "too-deep"
    ),
    of("nineteen-deep", good("nineteen-deep", nested_maps(18)), "unknown-field"),
    refused("keys-1500", good("keys-1500", keys(1_500)), "too-many-values"),
    refused("keys-60000", good("keys-60000", keys(60_000)), "front-matter-too-long"),
    refused("list-2000", good("list-2000", "a:\n" + "- b\n" * 2_000), "too-many-values"),
    refused("long-value", described("long-value", "d" * 20_000), "front-matter-too-long"),
    of("colons", described("colons", "a: " * 5_000), "yaml", "description-too-long"),
    of(
        "many-colons",
        good("many-colons", "".join(f"k{i}: a: b\n" for i in range(900))),
        "yaml",
        "unknown-field",
    ),
    of("open-quotes", good("open-quotes", 'a: "b\n' * 2_000), "yaml", "unknown-field"),
    of("question-marks", good("question-marks", "? " * 5_000 + "\n"), "key"),
    of("spaces", good("spaces", " " * 15_000 + "x\n")),
    of("long-body", good("long-body", body="word " * 5_000), "body-too-long"),
)

NAMES = (
    of("no-name", fields("description: Does."), "no-name"),
    of("blank-name", fields("name: ' '\ndescription: Does."), "no-name"),
    of("list-name", fields("name:\n  - a\ndescription: Does."), "no-name"),
    of("another", good("other"), "name-mismatch"),
    of("Upper", good("Upper"), "name-case"),
    of("case-differs", good("Case-Differs"), "name-case", "name-mismatch"),
    of("under_score", good("under_score"), "name-characters"),
    of("with space", good("with space"), "name-characters"),
    of("back\\slash", good("back\\slash"), "name-characters"),
    of("dot.ted", good("dot.ted"), "name-characters"),
    of("-first", good("-first"), "name-hyphens"),
    of("last-", good("last-"), "name-hyphens"),
    of("two--hyphens", good("two--hyphens"), "name-hyphens"),
    of("65" + "-n" * 32, good("65" + "-n" * 32), "name-too-long"),
    of("wide", good("\uff57\uff49\uff44\uff45")),
    of("claude-helper", good("claude-helper"), "name-reserved"),
    refused("tagged", good("<b>tagged</b>"), "name-unusable", "xml-tag"),
    refused("slash", good("a/b"), "name-unusable"),
    refused("wide-slash", good("a\uff0fb"), "name-unusable"),
    refused("parent", good(".."), "name-unusable"),
    refused("hidden-folder", good(".snapshots"), "name-unusable"),
    refused("line-end", fields('name: "a\\nb"\ndescription: Does.'), "name-unusable"),
    refused("huge-name", good("n" * 300), "name-unusable"),
    refused("zero-width-name", fields("name: pdf\u200b\ndescription: Does."), "hidden-character"),
    refused("bidi-name", fields("name: a\u202eb\ndescription: Does."), "hidden-character"),
)

FIELDS = (
    refused("no-description", fields("name: no-description"), "no-description"),
    refused("blank-description", described("blank-description", "'  '"), "no-description"),
    refused("empty-description", described("empty-description", ""), "no-description"),
    of("1025", described("1025", "'" + "d" * 1025 + "'"), "description-too-long"),
    of(
        "list-description",
        described("list-description", "\n  - Does this\n  - and that"),
        "not-text",
    ),
    refused(
        "map-description",
        described("map-description", "\n  en: Does."),
        "no-description",
        "not-text",
    ),
    of("xml", described("xml", "Does <b>this</b>."), "xml-tag"),
    of("less-than", described("less-than", "Does a < b.")),
    of(
        "compatibility-501",
        good("compatibility-501", f"compatibility: {'c' * 501}\n"),
        "compatibility-too-long",
    ),
    of("license-list", good("license-list", "license:\n  - MIT\n"), "not-text"),
    of("metadata-text", good("metadata-text", "metadata: none\n"), "metadata"),
    of("metadata-list", good("metadata-list", "metadata:\n  - a\n"), "metadata"),
    of("metadata-nested", good("metadata-nested", "metadata:\n  a:\n    b: c\n")),
    of("tools-map", good("tools-map", "allowed-tools:\n  Read: yes\n"), "not-text"),
    of("not-invocable", good("not-invocable", "user-invocable: false\n"), "unknown-field"),
    of("maybe", good("maybe", "user-invocable: maybe\n"), "not-yes-or-no", "unknown-field"),
    of("hint", good("hint", "argument-hint: [file]\n"), "unknown-field", "flow-style"),
    of("hints", good("hints", "argument-hint: [from] [to]\n"), "yaml", "unknown-field"),
    of("unknown", good("unknown", "version: 1.0\ntriggers:\n  - a\n"), "unknown-field"),
    of("many-unknown", good("many-unknown", keys(200)), "unknown-field"),
    of("small", good("small"), "spelling", spelling="skill.md"),
    of("capital", good("capital"), "spelling", spelling="Skill.md"),
)

CASES = ORDINARY + DASHES + BYTES + SCALARS + YAML + BOMBS + NAMES + FIELDS
"""Every one of them lies in a folder of another name."""


def write(folder: Path) -> None:
    """Put all of them into that folder."""
    for case in CASES:
        place = folder / case.folder_name
        place.mkdir(parents=True)
        (place / case.spelling).write_bytes(case.document)


def plant(folder: Path) -> dict[str, Path]:
    """Make folders whose `SKILL.md` is no file one can read to its end; by what it is."""
    places = {name: folder / name for name in UNREADABLE}
    for place in places.values():
        place.mkdir(parents=True)
    os.mkfifo(places["pipe"] / "SKILL.md")
    (places["directory"] / "SKILL.md").mkdir()
    (places["broken-link"] / "SKILL.md").symlink_to("nowhere")
    (places["looping-link"] / "SKILL.md").symlink_to("SKILL.md")
    (places["endless"] / "SKILL.md").symlink_to("/dev/zero")
    (places["leaving-link"] / "SKILL.md").symlink_to("/etc/passwd")
    with (places["sparse"] / "SKILL.md").open("wb") as file:
        file.truncate(1 << 40)
    (places["looping-folder"] / "again").symlink_to(".", target_is_directory=True)
    (places["looping-folder"] / "SKILL.md").write_text(good("looping-folder"))
    return places


UNREADABLE = (
    "pipe",
    "directory",
    "broken-link",
    "looping-link",
    "endless",
    "leaving-link",
    "sparse",
    "looping-folder",
)
