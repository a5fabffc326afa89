"""The worker: claims a group, has the team work on its question, and puts it into the store with everybody's samples.

It samples from the newest published weights of every model and takes up newer ones between completions; at max_lag 0
there are none while a group is under way. Killed at any time it leaves nothing but a lease that expires.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from cotrain.assemble import load_cast, trained_models
from cotrain.curriculum import Stage, questions_at, read_stages, seat, stage_of
from cotrain.errors import InfrastructureError
from cotrain.loops import judge, resampled, rollouts, samples_by_model
from cotrain.processes.joined import PATIENCE_S, Joined, held
from cotrain.runs import MadeGroup, dump_record
from cotrain.store.base import Task
from cotrain.weights import Follower

log = logging.getLogger(__name__)


async def work(joined: Joined) -> None:
    """Make groups, `store.groups_per_worker` at once, until the run is over or the process shall stop.

    Raises:
        InfrastructureError: not one rollout could be finished in as many groups in a row as a step has.
    """
    read = read_stages(joined.config)
    cast = load_cast(joined.plan)
    stages = seat(cast, read)
    store = joined.store
    followers = [
        Follower(joined.folder, name, cast.engines[name], store.weights) for name in trained_models(joined.config)
    ]
    log.info("ready")
    watching = asyncio.create_task(_watch(followers))
    try:
        async with asyncio.TaskGroup() as lanes:
            for _ in range(joined.config.store.groups_per_worker):
                lanes.create_task(_lane(joined, stages, followers))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    finally:
        watching.cancel()


async def _watch(followers: Sequence[Follower]) -> None:
    """Look for newer weights now and then, for those who are in the middle of a group."""
    while True:
        await asyncio.sleep(PATIENCE_S)
        for follower in followers:
            follower.look()


async def _lane(joined: Joined, stages: Sequence[Stage], followers: Sequence[Follower]) -> None:
    """One group after the other."""
    store, config, empty = joined.store, joined.config, 0
    began, waited = time.perf_counter(), 0.0
    while not joined.stopped() and not store.status().is_over:
        task = store.claim(joined.owner, config.store.lease_s)
        if task is None:
            before = time.perf_counter()
            await asyncio.to_thread(store.wait, PATIENCE_S)
            waited += time.perf_counter() - before
            continue
        for follower in followers:
            follower.look()
        empty = 0 if await _make(joined, task, stages) else empty + 1
        log.info("busy %.0f%% of the time", 100 * (1 - waited / (time.perf_counter() - began)))
        if empty == config.sampling.questions_per_step:
            found = f"not one rollout could be finished in {empty} groups in a row"
            raise InfrastructureError(f"step {task.step}", found, "Mend what failed, then start the worker again")


async def _make(joined: Joined, task: Task, stages: Sequence[Stage]) -> bool:
    """Make and put one group; whether any rollout of it could be finished."""
    store, config, plan = joined.store, joined.config, joined.plan
    question = questions_at(stages, task.step, config)[task.place]
    started = time.perf_counter()
    try:
        with held(lambda: store.renew(task, config.store.lease_s), config.store.lease_s):
            roster = stage_of(stages, task.step).roster
            judged = await judge(plan, await rollouts(plan, roster, [question], task.step))
            (record,), dropped = await resampled(plan, roster, task.step, judged)
    except BaseException:
        store.release(task)
        raise
    seconds = time.perf_counter() - started
    samples = samples_by_model([record], list(config.models))
    sampled = record.group.num_sampled
    kept = dump_record(MadeGroup(record=record, dropped=dropped, time_s=seconds, worker=joined.owner))
    is_new = store.put(task, {name: samples[name] for name in trained_models(config)}, kept, sampled)
    what = f"{sampled} tokens in {seconds:.1f} s" if is_new else "was there already"
    log.info("step %d, group %d (%s): %s", task.step, task.place, question.id, what)
    return bool(record.group.trajectories)
