"""The tools: what they answer, and what they tell of a wrong argument."""

import asyncio
import inspect
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotrain.data.corpus import Corpus
from cotrain.endpoints import Endpoint
from cotrain.errors import InfrastructureError, ToolError
from cotrain.tools import calculator, in_thread, reason, search, visit
from cotrain.types import Passage
from support_server import serve

PAGES = [
    Passage(title="Ostel", text="Ostel is a town on\nthe river Vair."),
    Passage(title="Vair River", text="The Vair is long and cold."),
    Passage(title="Ada Tolven", text="Ada Tolven painted the town of Ostel in 1920 and again in 1931."),
    Passage(title="Ostel", text="It has a mayor."),
]


@pytest.fixture(scope="module", autouse=True)
def _no_proxy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.fixture
def corpus():
    return Corpus.open(PAGES)


def test_search_shows_titles_and_the_first_words(corpus):
    assert search(corpus, count=2, snippet_words=4)("river") == (
        "Ostel: Ostel is a town...\nVair River: The Vair is long..."
    )
    assert search(corpus, count=1, snippet_words=6)("cold") == "Vair River: The Vair is long and cold."
    assert search(corpus)("mayor") == "Ostel: It has a mayor."


@pytest.mark.parametrize("query", ["", "  ", "zzz", "the of"])
def test_search_without_hits(corpus, query):
    assert search(corpus)(query) == "nothing found"


@pytest.mark.parametrize("title", ["Ostel", " ostel ", "OSTEL\n"])
def test_visit_joins_the_passages_of_a_title(corpus, title):
    assert visit(corpus)(title) == "Ostel is a town on the river Vair. It has a mayor."


def test_visit_cuts(corpus):
    assert visit(corpus, words=3)("vair  river") == "The Vair is..."
    assert visit(corpus, words=6)("vair river") == "The Vair is long and cold."


@pytest.mark.parametrize(
    ("title", "closest"),
    [
        ("Ada Tolve", "closest: Ada Tolven)"),
        ("Vair", "closest: Vair River)"),
        ("ostl", "closest: Ostel)"),
        ("Ostel town", "closest: Ostel)"),
        ("qqq", "closest: none)"),
        ("", "closest: none)"),
    ],
)
def test_visit_tells_the_closest_title(corpus, title, closest):
    with pytest.raises(ToolError) as caught:
        visit(corpus)(title)
    assert closest in caught.value.found
    assert repr(title) in caught.value.found


def test_a_very_long_wrong_title_is_shortened(corpus):
    with pytest.raises(ToolError) as caught:
        visit(corpus)("word " * 5000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1931 - 1920) / 2", "5.5"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 3", "10/3"),
        ("-10 / 4", "-2.5"),
        ("1 / 8000", "0.000125"),
        ("1/3 + 2/3", "1"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("5.5 % 2", "1.5"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("-2 ** 2", "-4"),
        ("(-1) ** 1000000001", "-1"),
        ("1 ** 99999999999", "1"),
        ("0 ** 5", "0"),
        ("0 ** 0", "1"),
        ("+5 - -3", "8"),
        (".5 + 5.", "5.5"),
        ("1,234,567 + 1", "1234568"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("  3\t", "3"),
        ("0.0", "0"),
        ("-0", "0"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
        ("1920 < 1931", "yes"),
        ("1920 > 1931", "no"),
        ("1 < 2 < 3", "yes"),
        ("1 < 3 < 2", "no"),
        ("0.1 + 0.2 == 0.3", "yes"),
        ("1/3 != 0.333", "yes"),
        ("2 >= 2", "yes"),
        ("2 <= 1", "no"),
    ],
)
def test_calculator(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("", "not an expression"),
        ("1 +", "not an expression"),
        ("2 + 2 = 4", "not an expression"),
        ("1 2", "not an expression"),
        ("(" * 150 + "1" + ")" * 40, "not an expression"),
        ("1" * 201, "not an expression"),
        ("1\n+1", "not an expression"),
        ("x", "not an expression"),
        ("abs(1)", "not an expression"),
        ("__import__('os')", "not an expression"),
        ("1e9", "not an expression"),
        ("1_000", "not an expression"),
        ("0x10", "not an expression"),
        ("1j", "not an expression"),
        ("1,2", "not an expression"),
        ("٣ + 1", "not an expression"),
        ("007", "not an expression"),
        ("()", "not arithmetic"),
        ("...", "not arithmetic"),
        ("1 (2)", "not arithmetic"),
        ("(1 < 2) + 1", "not arithmetic"),
        ("(1 < 2) < 3", "not arithmetic"),
        ("1 << 2", "not arithmetic"),
        ("1 / 0", "divides by zero"),
        ("1 % 0", "divides by zero"),
        ("1 // (2 - 2)", "divides by zero"),
        ("0 ** -1", "divides by zero"),
        ("2 ** 0.5", "the exponent 1/2 is not an integer"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** 100000000000", "too large"),
        ("0.5 ** 100000000000", "too large"),
        ("10 ** 99 * 10 ** 99", "too large"),
        ("9" * 180, "too large"),
    ],
)
def test_calculator_refuses(expression, found):
    with pytest.raises(ToolError, match=found):
        calculator(expression)


@given(st.text(alphabet="0123456789.+-*/%()<>=! ", max_size=30))
def test_calculator_answers_or_refuses_whatever_it_is_given(expression):
    try:
        value = calculator(expression)
    except ToolError:
        return
    assert value in ("yes", "no") or calculator(value) == value


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_calculator_is_exact(a, b):
    assert calculator(f"({a}) + ({b}) == {a + b}") == "yes"
    assert calculator(f"({a}) < ({b})") == ("yes" if a < b else "no")


def test_reason_asks_the_endpoint_with_the_question_alone():
    with serve("  Because of " + "x" * 50 + "\n") as server:
        endpoint = Endpoint(base_url=server.url, model="m")
        assert asyncio.run(reason(endpoint, max_characters=13)("why?")) == "Because of xx"
        assert server.requests[0]["messages"] == [{"role": "user", "content": "why?"}]
        with pytest.raises(ToolError):
            asyncio.run(reason(endpoint)(" "))
        assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [" \n", (400, "")])
def test_reason_without_an_answer_is_a_failure_of_the_world(reply):
    with serve(reply) as server, pytest.raises(InfrastructureError) as caught:
        asyncio.run(reason(Endpoint(base_url=server.url, model="m"))("why?"))
    assert caught.value.reason == "endpoint"


def test_tools_tell_in_a_line_what_they_are_for(corpus):
    endpoint = Endpoint(base_url="http://localhost/v1", model="m")
    tools = {"search": search(corpus), "visit": visit(corpus), "calculator": calculator, "reason": reason(endpoint)}
    tools |= {"threaded": in_thread(calculator)}
    about = {name: inspect.getdoc(tool).splitlines()[0] for name, tool in tools.items()}
    assert about == {
        "search": "Find pages by key words.",
        "visit": "Read the page with exactly this title.",
        "calculator": "Exact arithmetic, such as (1931 - 1920) / 2 or 1920 < 1931.",
        "reason": "Think about a question that needs no search.",
        "threaded": "Exact arithmetic, such as (1931 - 1920) / 2 or 1920 < 1931.",
    }


def test_in_thread_blocks_nobody_and_passes_errors_on():
    both = threading.Barrier(2, timeout=30)

    def meet(name: str) -> str:
        both.wait()  # passes only if two calls run at once
        return f"{name} in {'a thread' if threading.current_thread() is not main else 'the loop'}"

    async def run():
        return await asyncio.gather(in_thread(meet)("a"), in_thread(meet)("b"))

    main = threading.current_thread()
    assert asyncio.run(run()) == ["a in a thread", "b in a thread"]
    with pytest.raises(ToolError, match="divides by zero"):
        asyncio.run(in_thread(calculator)("1/0"))
