"""Which rule decides: deny first, then the narrowest that allows it."""

from collections.abc import Sequence

import pytest

from mcp_sandbox.config import AllowConfig, EgressConfig
from mcp_sandbox.egress.rules import EgressRule, EgressRules
from mcp_sandbox.egress.settings import parse_rule, read_egress_rules
from mcp_sandbox.egress.targets import Target
from mcp_sandbox.errors import ConfigError, InvalidArgument


def rules(*allow: str | AllowConfig, deny: Sequence[str] = ()) -> EgressRules:
    return read_egress_rules(EgressConfig(allow=allow, deny=tuple(deny)))


def allowed(known: EgressRules, host: str, port: int = 443) -> EgressRule | None:
    return known.judge(Target(host, port))[0]


def test_nothing_is_allowed_by_an_empty_list() -> None:
    verdict = rules().judge(Target("a.example", 443))
    assert verdict == (None, "no rule allows it")


def test_a_host_means_itself_at_the_ports_of_the_web() -> None:
    known = rules("api.example.com")
    assert allowed(known, "api.example.com", 80)
    assert allowed(known, "api.example.com", 443)
    verdict = known.judge(Target("api.example.com", 22))
    assert verdict == (None, "no rule allows port 22 of this host")
    for other in (
        "example.com",
        "x.api.example.com",
        "api.example.com.evil.example",
        "xapi.example.com",
    ):
        assert not allowed(known, other), other


def test_a_port_is_the_only_one() -> None:
    known = rules("a.example:8443")
    assert allowed(known, "a.example", 8443)
    assert not allowed(known, "a.example", 443)


def test_a_star_means_subdomains_at_any_depth_and_not_the_host() -> None:
    known = rules("*.example.org:8443")
    assert allowed(known, "a.example.org", 8443)
    assert allowed(known, "a.b.c.example.org", 8443)
    for other in ("example.org", "aexample.org", "a.example.org.evil.example"):
        assert not allowed(known, other, 8443), other
    assert not allowed(known, "a.example.org", 443)


@pytest.mark.parametrize(
    ("allow", "host", "port", "decides"),
    [
        (["*.example.org", "*.b.example.org"], "a.b.example.org", 443, "*.b.example.org"),
        (["*.b.example.org", "*.example.org"], "a.b.example.org", 443, "*.b.example.org"),
        (["*.b.example.org", "a.b.example.org"], "a.b.example.org", 443, "a.b.example.org"),
        (
            ["*.b.example.org:443", "*.b.example.org:80"],
            "a.b.example.org",
            80,
            "*.b.example.org:80",
        ),
        (["*.b.example.org:443", "*.example.org"], "a.b.example.org", 80, "*.example.org"),
        (["packages", "pypi.org"], "pypi.org", 443, "pypi.org"),
        (["packages"], "pypi.org", 443, "pypi.org (read only)"),
        (["git", "*.github.com"], "github.com", 443, "github.com (read only)"),
    ],
)
def test_the_narrowest_rule_decides(allow: list[str], host: str, port: int, decides: str) -> None:
    assert str(allowed(rules(*allow), host, port)) == decides


def test_deny_goes_before_all_and_at_every_port() -> None:
    grant = parse_rule("github.com:8443", source="grant")
    known = rules(
        "git", "*.example.com", deny=["github.com", "*.gist.example.com", "a.example.com:80"]
    )
    for port in (80, 443, 8443):
        verdict = known.judge(Target("github.com", port), [grant])
        assert verdict == (None, "egress.deny names github.com")
    assert not allowed(known, "x.gist.example.com")
    assert allowed(known, "gist.example.com")
    assert not allowed(known, "a.example.com", 80)
    assert allowed(known, "a.example.com", 443)


def test_presets_only_read_and_grants_are_for_public_hosts() -> None:
    known = rules("packages", "git")
    assert len(known.allow) > 10
    assert all(rule.read and not rule.private for rule in known.allow)
    assert {rule.source for rule in known.allow} == {"preset packages", "preset git"}
    grant = parse_rule("Later.Example.com.", read=True, source="grant until noon")
    assert grant == EgressRule("later.example.com", read=True, source="grant until noon")
    verdict = known.judge(Target("later.example.com", 443), [grant])
    assert verdict[1] == "grant until noon names later.example.com (read only)"


def test_a_grant_goes_before_a_rule_for_the_same_and_hides_no_private_host() -> None:
    private = AllowConfig(host="db.example.lan", port=5432, private=True)
    known = rules("packages", private)
    pypi = parse_rule("pypi.org", source="grant")
    assert known.judge(Target("pypi.org", 443), [pypi])[0] == pypi
    database = parse_rule("db.example.lan:5432", source="grant")
    rule = known.judge(Target("db.example.lan", 5432), [database])[0]
    assert rule
    assert rule.private


def test_international_names_of_the_settings_are_matched_as_they_are_resolved() -> None:
    known = rules("Bücher.example", "*.größe.example:8443", deny=["müll.example"])
    assert allowed(known, "xn--bcher-kva.example")
    assert allowed(known, "a.xn--gre-6ka8i.example", 8443)
    assert [rule.host for rule in known.deny] == ["xn--mll-hoa.example"]


NONSENSE = [
    *("*", "*.", "*.*", "*.com", "*.com:443", "*.com.", "**.example.com", "*.*.example.com"),
    *("a.*.example.com", "*a.example.com", "a.example.*", "*.127.0.0.1", "*:80"),
    *("", " ", ".", "a..example", "a b.example", "a.example ", "a.example/", "https://a.example"),
    *("a.example:", "a.example:0", "a.example:65536", "a.example:80:80", "a.example:http"),
    *("10.0.0.1", "127.1", "[::1]", "[::1]:80", "0x7f.1", "user@a.example", "a.example\n"),
    *(
        "package",
        "localhost",
        "localhost:8080",
        "host",
        "bü cher.example",
        "\ud800.example",
        "ü" * 300,
    ),
]


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_an_error_of_the_settings_with_a_sentence(text: str) -> None:
    for settings in (EgressConfig(allow=(text,)), EgressConfig(deny=(text,))):
        with pytest.raises(ConfigError) as caught:
            read_egress_rules(settings)
        assert str(caught.value).startswith("egress: ")
        assert "write" in str(caught.value) or "correct" in str(caught.value)
    with pytest.raises(InvalidArgument):
        parse_rule(text, source="grant")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (AllowConfig(host="a.example", private=True), "one host and its port"),
        (AllowConfig(host="*.a.example", port=80, private=True), "one host and its port"),
        (AllowConfig(host="10.0.0.1", port=80, private=True), "by its name, not by an address"),
        (AllowConfig(host="a.example:80", port=443), "no host for a rule"),
        (AllowConfig(host="packages", port=443), "no preset here"),
    ],
)
def test_a_private_host_is_written_out(entry: AllowConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rules(entry)


def test_a_private_host_may_have_one_label() -> None:
    for host in ("db", "host.internal", "10.0.0.1.example"):
        rule = allowed(rules(AllowConfig(host=host, port=5432, private=True)), host, 5432)
        assert rule
        assert (rule.private, rule.ports) == (True, frozenset({5432}))


@pytest.mark.parametrize(
    ("allow", "deny", "words"),
    [
        (["a.example", "A.example."], [], "a.example twice"),
        (["a.example", "a.example:443"], [], "a.example twice"),
        (["*.a.example", AllowConfig(host="*.a.example", read=True)], [], "twice"),
        (["a.example"], ["a.example"], "deny refuses by a.example: remove one"),
        (["*.b.a.example:80"], ["*.a.example"], "deny refuses by \\*.a.example: remove one"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(
    allow: list[str | AllowConfig], deny: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        rules(*allow, deny=deny)


def test_rules_that_only_overlap_are_not() -> None:
    rules(
        "a.example",
        "a.example:8443",
        "*.a.example",
        "b.a.example:80",
        deny=["c.a.example", "a.example:80"],
    )
