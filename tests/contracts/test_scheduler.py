"""Scheduler: every option orders all that wait, invents nobody, and starves nobody."""

from __future__ import annotations

from pipeline.types import Request, Sequence

GROUP = "scheduler"


def waiting(count):
    rows = [
        Sequence(Request(id=str(i), client=f"client {i % 3}", priority=i % 2), print)
        for i in range(count)
    ]
    for row in rows:
        row.prompt_ids, row.max_new = [1] * (1 + 7 * len(row.request.id)), 10
    return rows


def test_an_order_is_a_permutation_of_those_who_wait(option):
    scheduler = option()
    scheduler.open()
    rows = waiting(11)
    before = list(rows)
    ordered = scheduler.order(rows, [])
    assert rows == before
    assert sorted(map(id, ordered)) == sorted(map(id, rows))
    assert scheduler.order([], rows) == []
    scheduler.close()


def test_a_step_has_room_for_a_token(option):
    assert option().step_tokens is None or option().step_tokens >= 1


def test_nobody_waits_for_ever(option):
    scheduler = option()
    scheduler.open()
    patient, *others = waiting(4)
    queue = [patient, *others]
    for _ in range(200):
        first = scheduler.order(queue, [])[0]
        if first is patient:
            break
        queue.remove(first)
        scheduler.started(first)
        scheduler.finished(first)
        queue += waiting(1)
    assert first is patient
    scheduler.close()
