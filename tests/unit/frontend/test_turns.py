"""A burst of requests is prepared one a pass of the loop, in order."""

import asyncio
from collections import Counter

from drumline.frontend.turns import Turns


def test_of_a_burst_one_is_let_through_in_each_pass_in_order_and_others_run_between():
    async def burst():
        turns, passes, order, at = Turns(), 0, [], Counter()

        async def count():
            nonlocal passes
            while True:
                await asyncio.sleep(0)
                passes += 1

        async def prepare(number):
            await turns.mine()
            order.append(number)
            at[passes] += 1

        counting = asyncio.create_task(count())
        await asyncio.gather(*(prepare(number) for number in range(64)))
        counting.cancel()
        return order, at

    order, at = asyncio.run(burst())
    assert order == list(range(64))
    assert max(at.values()) == 1


def test_one_that_leaves_while_it_waits_holds_nobody_up():
    async def leaving():
        turns = Turns()
        waiting = [asyncio.create_task(turns.mine()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[1].cancel()
        async with asyncio.timeout(1):
            await waiting[2]

    asyncio.run(leaving())
