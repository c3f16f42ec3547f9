"""Bounds by message passing, against brute force over all choices of random programs."""

import itertools

import numpy as np
import pytest

from shardrules.core.deadline import NO_DEADLINE, Deadline
from shardrules.programs.autoplan.solve.messages import Messages
from shardrules.programs.autoplan.solve.search import Task
from tests.programs.autoplan.solve.test_solver import best_cost, random_task

SWEEPS = 40


def passed(task: Task, sweeps: int = SWEEPS) -> Messages:
    messages = Messages(task.problem, [np.zeros(len(node.layouts)) for node in task.problem.nodes])
    messages.settle(sweeps, NO_DEADLINE)
    return messages


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_below_the_best(seed: int) -> None:
    task = random_task(seed)
    best = best_cost(task.problem)
    for sweeps in (0, 1, SWEEPS):
        assert passed(task, sweeps).bound() <= best * (1 + 1e-6)


def test_the_bound_is_the_best_mostly() -> None:
    tasks = [random_task(seed) for seed in range(16)]
    near = [passed(task).bound() >= best_cost(task.problem) * (1 - 1e-4) for task in tasks]
    assert sum(near) >= 0.9 * len(near) - 1


def test_no_sweep_lowers_the_bound() -> None:
    task = random_task(6, "x:2,y:2,z:2")
    messages = passed(task, 0)
    bounds = [messages.bound()]
    for _ in range(20):
        messages.sweep()
        bounds.append(messages.bound())
    assert all(later >= earlier - 1e-9 * abs(earlier) for earlier, later in itertools.pairwise(bounds))


def test_choices_read_from_messages_are_the_best_mostly() -> None:
    best = 0
    for seed in range(16):
        task = random_task(seed)
        messages = passed(task)
        choices = messages.decoded(), messages.narrowed(8, NO_DEADLINE)
        best += min(map(task.problem.cost, choices)) <= best_cost(task.problem) * (1 + 1e-6)
    assert best >= 14


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", [6, 12, 36, 42, 58, 61])
def test_prices_raise_the_bound_to_no_more_than_choices_pay(seed: int) -> None:
    task = random_task(seed)
    messages = passed(task)
    timeline = task.occupancy.timeline(messages.decoded())
    limit = float(timeline.max())
    constraint = task.occupancy.constraint(int(timeline.argmax()), limit, certain=True)
    price = best_cost(task.problem) / limit
    paid = messages.charge([constraint], [price])
    bound = messages.settle(SWEEPS, NO_DEADLINE) - paid
    assert bound <= best_cost(task.problem) * (1 + 1e-6)  # its cheapest choice fits
    messages.charge([constraint], [0.0])
    assert messages.settle(SWEEPS, NO_DEADLINE) <= best_cost(task.problem) * (1 + 1e-6)


def test_narrowing_changes_no_message() -> None:
    messages = passed(random_task(36))
    before = messages.bound()
    messages.narrowed(4, NO_DEADLINE)
    assert messages.bound() == before


def test_states_bring_messages_and_prices_back() -> None:
    task = random_task(36)
    messages = passed(task)
    before, choice, state = messages.bound(), messages.decoded(), messages.state()
    timeline = task.occupancy.timeline(choice)
    constraint = task.occupancy.constraint(int(timeline.argmax()), 0.0)
    messages.charge([constraint], [1e3 * task.problem.cost(choice) / float(timeline.max())])
    assert messages.settle(SWEEPS, NO_DEADLINE) > before
    messages.restore(state)
    assert messages.bound() == before
    assert messages.decoded() == choice


def test_without_time_there_is_a_bound() -> None:
    task = random_task(17)
    messages = passed(task, 0)
    assert 0 < messages.settle(10**6, Deadline(0.0)) <= best_cost(task.problem) * (1 + 1e-6)
