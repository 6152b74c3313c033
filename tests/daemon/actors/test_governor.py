"""The governor actor: its turns end, so that everybody else on the loop has theirs."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from tensord.daemon.actors.governor import GovernorActor
from tensord.daemon.actors.messages import Queried
from tensord.daemon.actors.pump import ITEMS_MAX
from tensord.daemon.governor.forms.limits import GovernorLimits
from tensord.daemon.governor.governor import Governor
from tensord.ipc.messages import control as messages


def test_between_two_turns_of_a_flood_everybody_else_on_the_loop_has_one() -> None:
    async def answered_by_then() -> list[int]:
        governor = GovernorActor(
            Governor(GovernorLimits()),
            clock=lambda: 0.0,  # messages that take no time: only their number ends a turn
            tell_store=lambda _: None,
            reading=lambda _: None,
            hasten=lambda: None,
            tell_watchers=lambda _: None,
        )
        loop = asyncio.get_running_loop()
        flood = [Queried(messages.StatusQuery(number), loop.create_future()) for number in range(5 * ITEMS_MAX)]
        for question in flood:
            governor.inbox.tell_now(question)
        running = asyncio.create_task(governor.run())
        answered = [0]
        while answered[-1] < len(flood):
            await asyncio.sleep(0)
            answered.append(sum(question.answer.done() for question in flood))
        running.cancel()
        return answered

    answered = asyncio.run(answered_by_then())
    assert max(after - before for before, after in pairwise(answered)) == ITEMS_MAX
