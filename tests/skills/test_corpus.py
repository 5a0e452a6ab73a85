"""Every document of the corpus is read as it says, and quickly."""

import json
import time

import pytest

from mcp_sandbox.skills.parse import parse
from tests.skills.corpus import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_document_is_used_or_not_and_its_faults_are_said(case: Case) -> None:
    began = time.thread_time()
    parsed = parse(case.document, case.folder_name, case.spelling)
    assert time.thread_time() - began < 0.5
    assert tuple(each.code for each in parsed.diagnostics) == case.codes
    assert (parsed.front is not None) == case.loads
    assert all(
        each.reason and each.fix and each.file == case.spelling for each in parsed.diagnostics
    )


@pytest.mark.parametrize("case", [each for each in CASES if each.loads], ids=lambda case: case.name)
def test_what_is_read_can_be_sent_as_json(case: Case) -> None:
    front = parse(case.document, case.folder_name, case.spelling).front
    assert front is not None
    sent = json.dumps(front.fields, allow_nan=False, ensure_ascii=False).encode()
    assert json.loads(sent) == front.fields


def test_the_corpus_has_a_folder_for_each() -> None:
    names = [case.folder_name for case in CASES]
    assert len(set(names)) == len(names)
