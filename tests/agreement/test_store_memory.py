"""The store in memory answers as the one in a database: the same random operations, the same answers and refusals."""

import random
import re
import threading
from collections import Counter
from dataclasses import replace

import pytest

from cotrain.errors import CotrainError
from cotrain.store.memory import MemoryStore
from cotrain.store.sql import SqlStore
from support_store import MODELS, Clock, group, sample, terms, weights

OWNERS = ("a", "b")


def answer(operation, store):
    """What the store returns or refuses; a refusal names the object in words of its own, the store apart."""
    try:
        return operation(store)
    except CotrainError as error:
        return type(error), re.sub("run run in .*", "", error.where), error.found, error.fix


def spoilt_group(draw):
    return draw.choice(
        [
            {"main": []},
            {**group(), "other": []},
            {**group(), "sub": [sample("main")]},
            {**group(), "main": [sample(logprobs=(0.0, float("nan"), 0.0, 0.0))]},
            {**group(), "main": [sample(token_ids=tuple(range(3000)), mask=(True,) * 3000)]},
        ]
    )


def change(draw, tasks, heads):
    """An operation that may change the run, likely one that goes through."""
    owner, model, task = draw.choice(OWNERS), draw.choice(MODELS), draw.choice(tasks) if tasks else None
    lease_s, step = draw.choice([5.0, 50.0]), heads[model] + draw.choice([1, 1, 1, 1, 1, 0, 2])
    parts = group(num_tokens=draw.choice([2, 300]), version=draw.randrange(3))
    parts = {**parts, "sub": []} if draw.random() < 0.3 else spoilt_group(draw) if draw.random() < 0.1 else parts
    what = {"dropped": draw.choice([(), (), (1,), (0, 0), (7,)]), "saved": draw.random() < 0.7}
    made = weights(model, max(0, step), digest=f"{max(0, step) + draw.choice([0, 0, 1]):064x}")
    begun = terms(steps=draw.choice([3, 5, 9]), max_lag={"main": draw.randrange(3), "sub": draw.randrange(3)})
    begun = replace(begun, max_sampled=draw.choice([None, None, 90]), places=draw.choice([2, 2, 2, 3]))
    choices = [
        ("claim", 9, lambda store: store.claim(owner, lease_s)),
        ("put", 9, lambda store: store.put(task, parts, b"record", 10)),
        ("publish", 14, lambda store: store.publish(owner, made, {"loss": 0.5}, **what)),
        ("lead", 4, lambda store: store.lead(model, owner, lease_s)),
        ("resign", 1, lambda store: store.resign(model, owner)),
        ("renew", 2, lambda store: store.renew(task, lease_s)),
        ("release", 1, lambda store: store.release(task)),
        ("begin", 1, lambda store: store.begin(begun)),
        ("wrote", 1, lambda store: store.wrote(heads[model])),
        ("prune", 1, lambda store: store.prune(dry_run=step % 2 == 0)),
        ("tell", 1, lambda store: store.tell(owner, "kind", step=step)),
    ]
    known = [choice for choice in choices if task is not None or choice[0] not in ("put", "renew", "release")]
    return draw.choices(known, [weight for _, weight, _ in known])[0]


def looks(store):
    """Everything that a store tells without changing."""
    looks = [store.terms, store.status, store.ledger, store.events]
    of_step = [store.records, *(lambda step, model=model: store.take(model, step) for model in MODELS)]
    of_step += [lambda step, model=model: store.weights(model, step) for model in (*MODELS, "other")]
    of_step += [lambda step, model=model: store.metrics(model, step) for model in (*MODELS, "other")]
    found = [answer(lambda _, look=look: look(), store) for look in looks]
    return found + [answer(lambda _, look=look, step=step: look(step), store) for look in of_step for step in range(7)]


@pytest.mark.parametrize("seed", range(3))
def test_the_store_in_memory_answers_like_the_one_in_a_database(seed):
    draw, clock, tasks, done = random.Random(seed), Clock(), [], Counter()
    settings = {"clock": clock, "max_part_bytes": 9000, "max_waiting_bytes": 2500}
    stores = [SqlStore("sqlite://", **settings), MemoryStore(**settings)]
    for operation in (lambda store: store.claim("a", 1.0), lambda store: store.status()):
        assert answer(operation, stores[0]) == answer(operation, stores[1])
    for store in stores:
        store.begin(terms(steps=5))
    for number in range(200):
        name, _, operation = change(draw, tasks[-4:], stores[0].status().heads)
        first, second = (answer(operation, store) for store in stores)
        assert first == second, (number, name)
        done[name] += not isinstance(first, tuple)
        if name == "claim" and first is not None:
            tasks.append(first)
        if number % 20 == 0:
            assert looks(stores[0]) == looks(stores[1]), (number, name)
        clock.now_s += draw.choice([0.0, 1.0, 10.0])
    assert stores[0].status().complete >= 1, "the operations led nowhere"
    assert min(done[name] for name in ("claim", "put", "publish")) > 2, done
    for store in stores:
        store.close()


def test_what_others_commit_wakes_who_waits_and_own_commits_do_not():
    store = MemoryStore()
    store.begin(terms())
    store.status()
    store.tell("me", "kind")
    assert not store.wait(0.0)
    other = threading.Thread(target=store.tell, args=("other", "kind"))
    other.start()
    assert store.wait(30.0)
    other.join()
