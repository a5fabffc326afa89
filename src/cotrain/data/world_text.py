"""The words of the generated world: kinds of pages, relations with their sentences and questions, and filler.

Plain data, read by `world`. In templates {s} is the subject's name, {o} the value, {it} and {its} the subject's
pronouns at the start of a sentence, {n} a noun phrase for the subject ("the author of Silent Karova"). A relation's
sentences, and no others, state its value; filler never states one that a question asks for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One kind of fact: `subject` and `object` are kinds of pages, or `object` is "" for a plain value.

    `sentences` state it, `questions` ask for its value, and `phrases` name the value inside a longer question; a plain
    value has no phrases, since no hop goes on from it.
    """

    name: str
    subject: str
    object: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    phrases: tuple[str, ...] = ()


SHARES = {"country": 0.04, "city": 0.16, "organisation": 0.15, "work": 0.2}
"""Fraction of the pages that each kind has; the rest are people."""

OPENINGS = {
    "person": "profession",
    "city": "country",
    "country": "capital",
    "organisation": "base",
    "work": "author",
}
"""The relation that opens the pages of each kind, and so is on all of them."""

RELATIONS = (
    Relation(
        name="profession",
        subject="person",
        object="",
        sentences=("{s} is a {o}.", "{s} works as a {o}."),
        questions=("What is the profession of {n}?", "What does {n} do for a living?"),
    ),
    Relation(
        name="birthplace",
        subject="person",
        object="city",
        sentences=("{it} was born in {o}.", "{its} birthplace is {o}."),
        questions=("Where was {n} born?", "In which city was {n} born?"),
        phrases=("the city where {n} was born", "the birthplace of {n}"),
    ),
    Relation(
        name="employer",
        subject="person",
        object="organisation",
        sentences=("{it} works for {o}.", "{it} is employed by {o}."),
        questions=("Which organisation does {n} work for?", "Who employs {n}?"),
        phrases=("the organisation that {n} works for", "the employer of {n}"),
    ),
    Relation(
        name="spouse",
        subject="person",
        object="person",
        sentences=("{it} is married to {o}.", "{its} spouse is {o}."),
        questions=("Who is married to {n}?", "Who is the spouse of {n}?"),
        phrases=("the spouse of {n}", "the person married to {n}"),
    ),
    Relation(
        name="wrote",
        subject="person",
        object="work",
        sentences=("{it} wrote {o}.", "{it} is the author of {o}."),
        questions=("Which work did {n} write?", "Which work was written by {n}?"),
        phrases=("the work that {n} wrote", "the work written by {n}"),
    ),
    Relation(
        name="founded",
        subject="person",
        object="organisation",
        sentences=("{it} founded {o}.", "{it} is the founder of {o}."),
        questions=("Which organisation did {n} found?", "Which organisation was founded by {n}?"),
        phrases=("the organisation that {n} founded", "the organisation founded by {n}"),
    ),
    Relation(
        name="birth year",
        subject="person",
        object="",
        sentences=("{its} year of birth is {o}.", "{it} was born in the year {o}."),
        questions=("In what year was {n} born?", "What is the year of birth of {n}?"),
    ),
    Relation(
        name="author",
        subject="work",
        object="person",
        sentences=("{s} is a {kind} by {o}.", "{s} is a {kind} that {o} wrote."),
        questions=("Who wrote {n}?", "Who is the author of {n}?"),
        phrases=("the author of {n}", "the person who wrote {n}"),
    ),
    Relation(
        name="setting",
        subject="work",
        object="city",
        sentences=("{it} is set in {o}.", "{its} story takes place in {o}."),
        questions=("In which city is {n} set?", "Where does {n} take place?"),
        phrases=("the city where {n} is set", "the city in which {n} takes place"),
    ),
    Relation(
        name="year",
        subject="work",
        object="",
        sentences=("{it} appeared in {o}.", "{it} was published in {o}."),
        questions=("In what year was {n} published?", "When did {n} appear?"),
    ),
    Relation(
        name="base",
        subject="organisation",
        object="city",
        sentences=("{s} is a {kind} based in {o}.", "{s} is a {kind} with its offices in {o}."),
        questions=("Where is {n} based?", "In which city is {n} based?"),
        phrases=("the city where {n} is based", "the home city of {n}"),
    ),
    Relation(
        name="founder",
        subject="organisation",
        object="person",
        sentences=("{it} was founded by {o}.", "{its} founder is {o}."),
        questions=("Who founded {n}?", "Who is the founder of {n}?"),
        phrases=("the founder of {n}", "the person who founded {n}"),
    ),
    Relation(
        name="leader",
        subject="organisation",
        object="person",
        sentences=("{it} is led by {o}.", "{its} leader is {o}."),
        questions=("Who leads {n}?", "Who is the leader of {n}?"),
        phrases=("the leader of {n}", "the person who leads {n}"),
    ),
    Relation(
        name="founding year",
        subject="organisation",
        object="",
        sentences=("{it} was founded in {o}.", "{its} founding year is {o}."),
        questions=("In what year was {n} founded?", "What is the founding year of {n}?"),
    ),
    Relation(
        name="country",
        subject="city",
        object="country",
        sentences=("{s} is a city in {o}.", "{s} is a town in {o}."),
        questions=("In which country is {n}?", "Which country does {n} belong to?"),
        phrases=("the country of {n}", "the home country of {n}"),
    ),
    Relation(
        name="mayor",
        subject="city",
        object="person",
        sentences=("{its} mayor is {o}.", "{it} is governed by {o}."),
        questions=("Who is the mayor of {n}?", "Who governs {n}?"),
        phrases=("the mayor of {n}", "the person who governs {n}"),
    ),
    Relation(
        name="product",
        subject="city",
        object="",
        sentences=("{it} is known for its {o}.", "{it} is famous for its {o}."),
        questions=("What is {n} known for?", "Which product made {n} famous?"),
    ),
    Relation(
        name="river",
        subject="city",
        object="",
        sentences=("{it} lies on the river {o}.", "{its} river is the {o}."),
        questions=("On which river does {n} lie?", "Which river flows through {n}?"),
    ),
    Relation(
        name="capital",
        subject="country",
        object="city",
        sentences=("{s} is a country whose capital is {o}.", "{s} is a country with {o} as capital."),
        questions=("What is the capital of {n}?", "Which city is the capital of {n}?"),
        phrases=("the capital of {n}", "the capital city of {n}"),
    ),
    Relation(
        name="ruler",
        subject="country",
        object="person",
        sentences=("{it} is ruled by {o}.", "{its} ruler is {o}."),
        questions=("Who rules {n}?", "Who is the ruler of {n}?"),
        phrases=("the ruler of {n}", "the person who rules {n}"),
    ),
    Relation(
        name="currency",
        subject="country",
        object="",
        sentences=("{its} currency is the {o}.", "{its} people pay with the {o}."),
        questions=("What is the currency of {n}?", "Which currency is used in {n}?"),
    ),
    Relation(
        name="language",
        subject="country",
        object="",
        sentences=("{its} language is {o}.", "{its} people speak {o}."),
        questions=("Which language is spoken in {n}?", "What is the language of {n}?"),
    ),
)
"""Every kind of fact that a question may ask for."""

FILLER = {
    "person": (
        "{it} once spent a summer in {city}.",
        "{it} wrote letters to {person}.",
        "{it} once had a house near {city}.",
        "{it} keeps a box of {thing}.",
        "{it} likes to collect old {thing}.",
        "{it} speaks slowly and rarely travels.",
        "{its} hair turned grey at an early age.",
    ),
    "work": (
        "{it} was praised by {person}.",
        "{it} briefly mentions {city}.",
        "{its} first pages describe some {thing}.",
        "{it} was translated many times.",
        "{it} is rather long and sad.",
        "{it} was printed on blue paper.",
    ),
    "organisation": (
        "{it} has a small branch in {city}.",
        "{it} was once sued by {person}.",
        "{its} hall is decorated with {thing}.",
        "{it} employs about ninety people.",
        "{its} doors are closed on Mondays.",
        "{its} sign shows a white bird.",
    ),
    "city": (
        "{it} was once visited by {person}.",
        "{it} trades mostly with {city}.",
        "{its} market sells many {thing}.",
        "{its} streets are narrow and steep.",
        "{it} has a bridge made of red stone.",
        "{its} winters are long and very cold.",
    ),
    "country": (
        "{it} was once described by {person}.",
        "{its} oldest road leads to {city}.",
        "{its} flag shows a pair of {thing}.",
        "{it} has many lakes and forests.",
        "{its} summers are dry and warm.",
        "{its} railways are slow but reliable.",
    ),
}
"""Sentences that no question needs; {city} and {person} are other pages of the world."""

THINGS = ("lamps", "roses", "maps", "clocks", "tulips", "coins", "feathers", "bells", "shells", "masks")
"""What filler is about; nothing here is a product or a profession."""

PRONOUNS = {
    "she": ("She", "Her"),
    "he": ("He", "His"),
    "city": ("It", "Its"),
    "country": ("It", "Its"),
    "organisation": ("It", "Its"),
    "work": ("It", "Its"),
}
"""{it} and {its} per kind of page; people have one of two."""

PROFESSIONS = (
    "painter", "baker", "lawyer", "teacher", "doctor", "sailor", "farmer", "carpenter", "singer", "chemist",
    "gardener", "judge", "tailor", "dentist", "pilot", "sculptor", "nurse", "miner", "librarian", "dancer",
    "banker", "photographer", "surgeon", "weaver", "violinist",
)  # fmt: skip
"""Values of `profession`, all with the article "a"."""

PRODUCTS = (
    "cheese", "salt", "glass", "wine", "honey", "pottery", "carpets", "silk", "leather", "copper", "marble", "bread",
    "beer", "olives", "tea", "paper", "candles", "rope", "soap", "knives", "furniture", "cider", "lace", "pears",
)  # fmt: skip
"""Values of `product`."""

FIRST_NAMES = {
    "she": (
        "Mirela", "Talina", "Orsa", "Velia", "Jorena", "Sanna", "Ilvy", "Kaleth", "Nerina", "Brisa", "Fenna", "Lioba",
        "Odelle", "Runa", "Tamsa", "Ysolde", "Zelma", "Arlena", "Corinne", "Dalia",
    ),
    "he": (
        "Oren", "Tobin", "Halvor", "Jarek", "Luden", "Maros", "Nikos", "Perrin", "Radim", "Soren", "Ulmar", "Vikten",
        "Wendel", "Yannis", "Zoltan", "Anders", "Benno", "Cassel", "Dorian", "Emmer",
    ),
}  # fmt: skip
"""First names; a surname is invented, and no two people share one."""

COMPANIES = {
    "College": "college", "Press": "publisher", "Bank": "bank", "Motors": "car maker", "Studios": "film company",
    "Mills": "paper maker", "Foods": "food company", "Records": "music label", "Theatre": "theatre", "Museum": "museum",
}  # fmt: skip
"""Second word of an organisation's name -> what it is."""

ADJECTIVES = (
    "Silent", "Golden", "Hidden", "Broken", "Distant", "Crimson", "Winter", "Burning", "Hollow", "Gentle", "Midnight",
    "Forgotten", "Wandering", "Frozen", "Scarlet", "Restless",
)  # fmt: skip
"""First word of a work's title; the second is invented."""

WORKS = ("novel", "play", "poem", "ballad", "fable", "drama")
"""What a work is."""

ONSETS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
)
"""How an invented syllable may begin."""

VOWELS = ("a", "e", "i", "o", "u", "ai", "au")
"""Its vowel."""

CODAS = ("l", "n", "r", "m", "s")
"""How it ends where a vowel follows."""

ENDINGS = {
    "person": ("sen", "ov", "ley", "gard", "ick", "ander", "wyn", "eth"),
    "city": ("mora", "burg", "ford", "haven", "stad", "vale", "ona", "port"),
    "country": ("ia", "land", "istan", "avia"),
    "organisation": ("ex", "on", "ist", "ura", "ell"),
    "work": ("ane", "ivar", "oth", "isk", "una"),
    "river": ("ava", "eth", "une", "ir"),
    "currency": ("ar", "ond", "ek", "int"),
    "language": ("ish", "ese", "ian"),
}
"""Endings of invented words by what they name."""
