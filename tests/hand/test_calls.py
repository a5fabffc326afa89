"""What replies say: calls, an answer or a fault, in both formats."""

import json

import pytest

from cotrain.calls import Reply, describe, parse_lines, parse_native

NAMES = ("search", "visit", "a helper")
MALFORMED = Reply(faults=("malformed",))
NO_ANSWER = Reply(faults=("no_answer",))


def calls(*pairs):
    return Reply(calls=pairs)


LINES = {
    # calls
    "search: red river": calls(("search", "red river")),
    "search:red river": calls(("search", "red river")),
    "  search:   red   river  ": calls(("search", "red   river")),
    "search: a\nvisit: b": calls(("search", "a"), ("visit", "b")),
    "search: a\nsearch: a": calls(("search", "a"), ("search", "a")),
    "\n\nsearch: a\n \t\n\n  visit: b\n": calls(("search", "a"), ("visit", "b")),
    "search: a\r\nvisit: b\r\n": calls(("search", "a"), ("visit", "b")),
    "search: a\rvisit: b": calls(("search", "a"), ("visit", "b")),
    "a helper: who?": calls(("a helper", "who?")),
    "search: when: 10:30": calls(("search", "when: 10:30")),
    "search: answer: 42": calls(("search", "answer: 42")),
    "search: search: a": calls(("search", "search: a")),
    "search: <tool_call>x</tool_call>": calls(("search", "<tool_call>x</tool_call>")),
    "search: Zürich 東京 🜚": calls(("search", "Zürich 東京 🜚")),
    "search: a\u2028visit: b\x0bc\x85d": calls(("search", "a\u2028visit: b\x0bc\x85d")),
    "search:\u00a0a\u3000": calls(("search", "a")),
    "search: :": calls(("search", ":")),
    # answers
    "answer: red": Reply(answer="red"),
    "answer:red": Reply(answer="red"),
    "\n answer: red \n": Reply(answer="red"),
    "answer:\nred\n\nold\n": Reply(answer="red\n\nold"),
    "answer: red\r\nold": Reply(answer="red\r\nold"),
    "answer: search: a": Reply(answer="search: a"),
    "answer: see\nnote: b": Reply(answer="see\nnote: b"),
    "answer: red\nanswer: old": Reply(answer="red\nanswer: old"),
    "answer: the search: it failed": Reply(answer="the search: it failed"),
    "answer: <tool_call>": Reply(answer="<tool_call>"),
    "answer: 東\n京": Reply(answer="東\n京"),
    # nothing said
    "": NO_ANSWER,
    " \r\n\t": NO_ANSWER,
    "answer:": NO_ANSWER,
    "answer: \n\n": NO_ANSWER,
    # neither
    "not a call": MALFORMED,
    "red": MALFORMED,
    ":": MALFORMED,
    ": a": MALFORMED,
    "search": MALFORMED,
    "search:": MALFORMED,
    "search: \nred": MALFORMED,
    "search red": MALFORMED,
    "search : red": MALFORMED,
    "Search: red": MALFORMED,
    "search： red": MALFORMED,
    "\u200bsearch: red": MALFORMED,
    "\ufeffsearch: red": MALFORMED,
    "- search: red": MALFORMED,
    "searches: red": MALFORMED,
    "fetch: red": MALFORMED,
    "search: a\nvisit:": MALFORMED,
    "search: a\nfetch: b": MALFORMED,
    "I will search.\nsearch: a": MALFORMED,
    "search: a\nThen we shall see.": MALFORMED,
    "search: a\nanswer: red": MALFORMED,
    "answer: red\nsearch: a": MALFORMED,
    "answer:\nsearch: a": MALFORMED,
    "answer: red\n  search:": MALFORMED,
    "Answer: red": MALFORMED,
    "The answer: red": MALFORMED,
    "answer red": MALFORMED,
    "<answer>red</answer>": MALFORMED,
    '<tool_call>{"name": "search", "arguments": {"q": "a"}}</tool_call>': MALFORMED,
}


@pytest.mark.parametrize("text", LINES)
def test_lines(text):
    assert parse_lines(text, NAMES) == LINES[text]


def test_lines_without_names():
    assert parse_lines("search: a", ()) == MALFORMED
    assert parse_lines("answer: a\nsearch: b", ()) == Reply(answer="a\nsearch: b")


def block(name="search", inside="\n", **arguments):
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>{inside}{said}{inside}</tool_call>"


A = ("search", "a")
NATIVE = {
    # calls
    block(q="a"): calls(A),
    block(q="a", inside=""): calls(A),
    block(q="a", inside=" \r\n "): calls(A),
    '<tool_call>{"arguments": {"q": "a"}, "name": "search"}</tool_call>': calls(A),
    block(q="a") + block("visit", url="b"): calls(A, ("visit", "b")),
    f"First {block(q='a')}\nthen {block(q='a')} done.": calls(A, A),
    f"search: b\nanswer: c\n{block(q='a')}\nanswer: d": calls(A),
    block(q="  a\n"): calls(A),
    block("a helper", task="who?\nwhere?"): calls(("a helper", "who?\nwhere?")),
    block(q='"quoted" \\ {braces}'): calls(("search", '"quoted" \\ {braces}')),
    block(q="Zürich 東京 🜚"): calls(("search", "Zürich 東京 🜚")),
    '<tool_call>{"name": "search", "arguments": {"q": "\\u6771\\ud83d\\udf1a"}}</tool_call>': calls(
        ("search", "東\U0001f71a")
    ),
    block(q="answer: 42"): calls(("search", "answer: 42")),
    block(q="</tool_call>"): calls(("search", "</tool_call>")),
    block(q="<tool_call>") + block(q="a"): calls(("search", "<tool_call>"), A),
    block(q=block(q="b")): calls(("search", block(q="b").strip())),
    # answers: without a tag the whole text
    "red": Reply(answer="red"),
    " red\nold \n": Reply(answer="red\nold"),
    "answer: red": Reply(answer="answer: red"),
    "search: a": Reply(answer="search: a"),
    '{"name": "search", "arguments": {"q": "a"}}': Reply(answer='{"name": "search", "arguments": {"q": "a"}}'),
    "<tool_response>\na\n</tool_response>": Reply(answer="<tool_response>\na\n</tool_response>"),
    "< tool_call >": Reply(answer="< tool_call >"),
    "": NO_ANSWER,
    " \n": NO_ANSWER,
    # neither
    "<tool_call>": MALFORMED,
    "</tool_call>": MALFORMED,
    "<tool_call></tool_call>": MALFORMED,
    "<tool_call>search: a</tool_call>": MALFORMED,
    block(q="a").removesuffix("</tool_call>"): MALFORMED,
    block(q="a").removeprefix("<tool_call>"): MALFORMED,
    block(q="a") + "</tool_call>": MALFORMED,
    "</tool_call>" + block(q="a"): MALFORMED,
    block(q="a") + "<tool_call>": MALFORMED,
    "<tool_call>" + block(q="a"): MALFORMED,
    block(q="a") + block("fetch", q="b"): MALFORMED,
    block("fetch", q="a"): MALFORMED,
    block("Search", q="a"): MALFORMED,
    block("", q="a"): MALFORMED,
    block(): MALFORMED,
    block(q="a", n="b"): MALFORMED,
    block(q=""): MALFORMED,
    block(q=" \n"): MALFORMED,
    block(q=1): MALFORMED,
    block(q=None): MALFORMED,
    block(q=["a"]): MALFORMED,
    block(q={"a": "b"}): MALFORMED,
    '<tool_call>{"name": "search", "arguments": "a"}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "arguments": ["a"]}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "arguments": "{\\"q\\": \\"a\\"}"}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search"}</tool_call>': MALFORMED,
    '<tool_call>{"arguments": {"q": "a"}}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "arguments": {"q": "a"}, "id": 1}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "name": "visit", "arguments": {"q": "a"}}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "arguments": {"q": "a", "q": "b"}}</tool_call>': MALFORMED,
    '<tool_call>{"name": ["search"], "arguments": {"q": "a"}}</tool_call>': MALFORMED,
    "<tool_call>{'name': 'search', 'arguments': {'q': 'a'}}</tool_call>": MALFORMED,
    '<tool_call>{"name": "search", "arguments": {"q": "a"}} and more</tool_call>': MALFORMED,
    '<tool_call>[{"name": "search", "arguments": {"q": "a"}}]</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "arguments": {"q": "a\nb"}}</tool_call>': MALFORMED,
    '<tool_call>{"name": "search", "arguments": {"q": "\\ud800"}}</tool_call>': MALFORMED,
    "<tool_call>null</tool_call>": MALFORMED,
    "<tool_call>" + "[" * 100_000 + "</tool_call>": MALFORMED,
    "<tool_call>" + "9" * 10_000 + "</tool_call>": MALFORMED,
}


@pytest.mark.parametrize("text", NATIVE, ids=lambda text: text[:80])
def test_native(text):
    assert parse_native(text, NAMES) == NATIVE[text]


def test_descriptions():
    assert describe("search", "finds pages") == "search: finds pages"
    assert describe("search", " finds\n  pages ") == "search: finds pages"
    assert describe("search", "") == "search"
